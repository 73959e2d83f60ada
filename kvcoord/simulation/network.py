"""The network between ranks and coordinators: delay, loss, repetition, disorder, cuts in one or both directions.

Each link draws from a random sequence of its own, so that taking a fault away from a run changes nothing elsewhere.
Every message travels as bytes.
"""

import random
from collections.abc import Callable
from enum import StrEnum
from functools import partial

import msgspec

from kvcoord.simulation.agenda import Agenda

DELAY_S_MIN, DELAY_S_MAX = 0.0002, 0.002


class Way(StrEnum):
    UP = "up"
    DOWN = "down"


class Envelope(msgspec.Struct, frozen=True):
    """A message on its way between a rank and a coordinator. `peer` is the rank's end, as the coordinator names it."""

    way: Way
    rank: int
    coordinator: int
    peer: bytes
    payload: bytes
    message: msgspec.Struct


class Weather:
    """What is wrong with one direction of one link now. Shares are of messages, 0 to 1."""

    __slots__ = ("cut", "delay_s", "disorder_s", "lost", "repeated")

    def __init__(self) -> None:
        self.cut = 0
        self.lost = 0.0
        self.repeated = 0.0
        self.delay_s = 0.0
        self.disorder_s = 0.0


class Network:
    """`deliver` is called with each message that arrives. `lose` may be set to lose messages on purpose."""

    def __init__(self, agenda: Agenda, seed: int, deliver: Callable[[Envelope], None]) -> None:
        self.lose: Callable[[Envelope], bool] = lambda envelope: False
        self.counts = {"sent": 0, "lost": 0, "repeated": 0, "cut": 0}
        self._agenda = agenda
        self._seed = seed
        self._deliver = deliver
        self._links: dict[tuple[Way, int, int], tuple[Weather, random.Random]] = {}
        self._last_arrival: dict[tuple[Way, bytes, int], float] = {}

    def weather(self, way: Way, rank: int, coordinator: int) -> Weather:
        return self._link(way, rank, coordinator)[0]

    def send(self, envelope: Envelope) -> None:
        weather, rng = self._link(envelope.way, envelope.rank, envelope.coordinator)
        self.counts["sent"] += 1
        delay_s = rng.uniform(DELAY_S_MIN, DELAY_S_MAX) + weather.delay_s
        if weather.cut:
            self.counts["cut"] += 1
            return
        if (weather.lost and rng.random() < weather.lost) or self.lose(envelope):
            self.counts["lost"] += 1
            return
        if weather.disorder_s:
            self._agenda.after(delay_s + rng.random() * weather.disorder_s, partial(self._arrive, envelope))
        else:
            line = (envelope.way, envelope.peer, envelope.coordinator)
            at = max(self._agenda.now + delay_s, self._last_arrival.get(line, 0.0))
            self._last_arrival[line] = at
            self._agenda.at(at, partial(self._arrive, envelope))
        if weather.repeated and rng.random() < weather.repeated:
            self.counts["repeated"] += 1
            late_s = rng.choice((0.001, 0.05, 1.0))
            self._agenda.after(delay_s + rng.random() * late_s, partial(self._arrive, envelope))

    def _arrive(self, envelope: Envelope) -> None:
        if self.weather(envelope.way, envelope.rank, envelope.coordinator).cut:
            self.counts["cut"] += 1
            return
        self._deliver(envelope)

    def _link(self, way: Way, rank: int, coordinator: int) -> tuple[Weather, random.Random]:
        key = (way, rank, coordinator)
        link = self._links.get(key)
        if link is None:
            rng = random.Random(f"{self._seed}/link/{way}/{rank}/{coordinator}")
            link = self._links[key] = (Weather(), rng)
        return link
