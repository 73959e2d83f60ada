"""What befalls the processes and lines of a run: chosen from a seed, begun, and ended after its time."""

import asyncio
import signal
from enum import StrEnum
from random import Random
from typing import Final

import msgspec

from kvcoord.load.chaos.group import COORDINATORS, ChaosGroup
from kvcoord.load.chaos.link import LinkState
from kvcoord.runtime.children import Child


class FaultKind(StrEnum):
    KILL_COORDINATOR = "coordinator killed"
    STOP_COORDINATOR = "coordinator stopped"
    KILL_WORKER = "worker killed"
    STOP_WORKER = "worker stopped"
    KILL_ENGINE = "engine killed"
    STOP_ENGINE = "engine stopped"
    CUT_RANK = "rank cut off from one coordinator"
    FREEZE_RANK = "line of a rank frozen"
    ONE_WAY = "line of a rank frozen one way"
    CUT_COORDINATOR = "coordinator cut off from all ranks"


WEIGHTS: Final = {
    FaultKind.KILL_COORDINATOR: 3,
    FaultKind.STOP_COORDINATOR: 2,
    FaultKind.KILL_WORKER: 2,
    FaultKind.STOP_WORKER: 2,
    FaultKind.KILL_ENGINE: 2,
    FaultKind.STOP_ENGINE: 2,
    FaultKind.CUT_RANK: 2,
    FaultKind.FREEZE_RANK: 1,
    FaultKind.ONE_WAY: 1,
    FaultKind.CUT_COORDINATOR: 1,
}

LASTS_S: Final = (0.05, 2.5)
"""Some faults are shorter than a heartbeat, some longer than it takes to be given up."""

_STOPS: Final = frozenset({FaultKind.STOP_COORDINATOR, FaultKind.STOP_WORKER, FaultKind.STOP_ENGINE})
_KILLS: Final = frozenset({FaultKind.KILL_COORDINATOR, FaultKind.KILL_WORKER, FaultKind.KILL_ENGINE})


class Fault(msgspec.Struct, frozen=True):
    """One fault. `target` is a rank or the index of a coordinator, `lasts_s` 0 for a kill."""

    kind: FaultKind
    target: int
    coordinator: int
    lasts_s: float


def draw(rng: Random, ranks: int) -> Fault:
    """The next fault of a seed."""
    kinds = list(WEIGHTS)
    [kind] = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])
    of_coordinator = kind in (FaultKind.KILL_COORDINATOR, FaultKind.STOP_COORDINATOR, FaultKind.CUT_COORDINATOR)
    target = rng.randrange(COORDINATORS if of_coordinator else ranks)
    lasts_s = rng.uniform(*LASTS_S)
    return Fault(kind, target, rng.randrange(COORDINATORS), 0.0 if kind in _KILLS else lasts_s)


async def inflict(fault: Fault, group: ChaosGroup) -> None:
    """Returns when the fault is over; its consequences may not be. Cancelled, it ends at once."""
    if fault.kind in _KILLS:
        child = _child(fault, group)
        child.expected = -signal.SIGKILL
        child.signal(signal.SIGKILL)
    elif fault.kind in _STOPS:
        child = _child(fault, group)
        child.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            child.signal(signal.SIGCONT)
    else:
        await _disturb(fault, group)


async def _disturb(fault: Fault, group: ChaosGroup) -> None:
    if fault.kind is FaultKind.CUT_COORDINATOR:
        links = [group.links[rank, fault.target] for rank in group.ranks]
    elif fault.kind is FaultKind.CUT_RANK:
        links = [group.links[fault.target, fault.coordinator]]
    else:
        links = [group.links[fault.target, index] for index in range(COORDINATORS)]
    state = {
        FaultKind.FREEZE_RANK: LinkState.FROZEN,
        FaultKind.ONE_WAY: LinkState.DOWN_FROZEN if fault.coordinator else LinkState.UP_FROZEN,
    }.get(fault.kind, LinkState.CUT)
    for link in links:
        link.set(state)
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        for link in links:
            link.set(LinkState.OPEN)


def _child(fault: Fault, group: ChaosGroup) -> Child:
    if fault.kind in (FaultKind.KILL_COORDINATOR, FaultKind.STOP_COORDINATOR):
        return group.coordinators[fault.target].child
    kept = group.workers if fault.kind in (FaultKind.KILL_WORKER, FaultKind.STOP_WORKER) else group.engines
    return kept[fault.target].child
