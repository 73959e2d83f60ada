"""Processes of an exploration: the production machines of the protocol, with time taken out.

The clock stands still. What time would bring about (a vote's deadline, a lost connection, a suspicion, saying
something again) are events like any other, and may happen at any moment. So every order of events is looked at.
"""

import pickle
from typing import Final

import msgspec

from kvcoord.domain import OperationId, OperationKind, Outcome, Reason
from kvcoord.protocol.codec import coordinator_decoder, encode, rank_decoder
from kvcoord.protocol.coordinator import CoordinatorMachine
from kvcoord.protocol.effects import Activated, Apply, Attach, CoordinatorEffect, RankEffect, Send, SendUp
from kvcoord.protocol.group import GroupLimits
from kvcoord.protocol.messages import Ack, Alive, Completion, Decision, Verdict, Vote, Waiting
from kvcoord.protocol.rank import Identity, RankLimits, RankMachine

_NEVER_S: Final = 1e9
_VOTE_TIMEOUT_S: Final = 1.0

_GROUP_LIMITS: Final = GroupLimits(
    heartbeat_timeout_s=_NEVER_S,
    prepare_timeout_s=_NEVER_S,
    vote_timeout_s=_VOTE_TIMEOUT_S,
    round_timeout_s=_NEVER_S,
    copy_timeout_s=_NEVER_S,
)
_RANK_LIMITS: Final = RankLimits(
    heartbeat_interval_s=0.0,
    heartbeat_timeout_s=_NEVER_S,
    gather_timeout_s=_NEVER_S,
    join_timeout_s=_NEVER_S,
    group_deadline_s=_NEVER_S,
)
_UP, _DOWN = rank_decoder(), coordinator_decoder()


class Mail(msgspec.Struct, frozen=True):
    """A message on its way. `receiver` is the number of a node, `peer` the rank's end of the connection."""

    receiver: int
    peer: bytes
    payload: bytes


def _eight_pages() -> list[int]:
    return [8]


def _no_pages() -> int:
    return 0


class RankNode:
    """One rank and its owner, who votes yes, copies what commits, and remembers what he is told."""

    def __init__(self, rank: int, ranks: int, coordinators: int, incarnation: int, *, lockstep: bool) -> None:
        identity = Identity(group="g", rank=rank, world_size=ranks, incarnation=incarnation, fingerprint={})
        self.machine = RankMachine(
            identity, coordinators, 1, _RANK_LIMITS, _eight_pages, lockstep=lockstep, held=_no_pages
        )
        self.rank = rank
        self.ranks = ranks
        self.coordinator = 0
        self.connection = 0
        self.step = 0
        self.voted: list[OperationId] = []
        self.outcomes: dict[OperationId, Outcome] = {}
        self.copying: list[OperationId] = []
        self.landed: list[OperationId] = []
        self.ends: dict[OperationId, bool] = {}
        """By operation: whether it completed (True) or was retracted."""

    @property
    def peer(self) -> bytes:
        return f"{self.rank}/{self.machine.identity.incarnation}/{self.connection}".encode()

    def start(self) -> list[Mail]:
        return self.perform(self.machine.start(0.0))

    def hear(self, mail: Mail) -> list[Mail]:
        if not self.is_current(mail.peer):
            return []
        return self.perform(self.machine.receive(_DOWN.decode(mail.payload), 0.0))

    def is_current(self, peer: bytes) -> bool:
        """What comes over a former connection is dropped."""
        return peer == self.peer

    def vote(self, operation: OperationId) -> list[Mail]:
        self.voted.append(operation)
        vote = Vote(operation, OperationKind.WRITE_THROUGH, True)
        return self.perform(self.machine.vote(vote, 0.0))

    def step_once(self, operation: OperationId | None) -> list[Mail]:
        """One step of a lockstep engine; the verdict that it needs is there."""
        due = self.machine.rounds.due(self.step)
        if due is not None:
            verdict = self.machine.rounds.verdict(due)
            assert verdict is not None
            self._verdict(verdict)
        if operation is not None:
            self.voted.append(operation)
            self.machine.defer(Vote(operation, OperationKind.WRITE_THROUGH, True))
        effects = self.machine.frame(self.step, [8], 1, 0.0)
        self.step += 1
        return self.perform(effects)

    def may_step(self) -> bool:
        due = self.machine.rounds.due(self.step)
        waits = due is not None and self.machine.rounds.verdict(due) is None
        return bool(self.machine.history) and not waits

    def copy_ended(self, operation: OperationId, ok: bool) -> list[Mail]:
        self.copying.remove(operation)
        if ok:
            self.landed.append(operation)
        ack = Ack(operation, ok, None if ok else Reason.COPY_FAILED)
        return self.perform(self.machine.ack(ack, 0.0))

    def suspect(self) -> list[Mail]:
        """Its coordinator seems to be gone: to the next one."""
        effects = self.machine.absent(0.0)
        return self.perform(effects + self.machine.tick(0.0))

    def repeat(self) -> list[Mail]:
        """A heartbeat: what is without an answer is said again."""
        return self.perform(self.machine.tick(0.0))

    def perform(self, effects: list[RankEffect]) -> list[Mail]:
        mails = []
        for effect in effects:
            if isinstance(effect, SendUp):
                mails.append(Mail(self.ranks + self.coordinator, self.peer, encode(effect.message)))
            elif isinstance(effect, Attach):
                self.coordinator = effect.index
                self.connection += 1
            elif isinstance(effect, Activated) and effect.fresh:
                self._begin()
            elif isinstance(effect, Apply):
                self._entry(effect.entry)
        return mails

    def _begin(self) -> None:
        self.step = 0
        for held in (self.voted, self.outcomes, self.copying, self.landed, self.ends):
            held.clear()

    def _verdict(self, verdict: Verdict) -> None:
        for completion in verdict.completions:
            self._entry(completion)
        for decision in verdict.decisions:
            self._entry(decision)

    def _entry(self, entry: Decision | Completion) -> None:
        if isinstance(entry, Completion):
            held = self.ends.setdefault(entry.operation, entry.ok)
            if held != entry.ok:
                raise AssertionError(f"rank {self.rank}: {entry.operation} ended twice, {held} and {entry.ok}")
            return
        held_outcome = self.outcomes.setdefault(entry.operation, entry.outcome)
        if held_outcome is not entry.outcome:
            raise AssertionError(f"rank {self.rank}: {entry.operation} is {held_outcome} and {entry.outcome}")
        if entry.outcome is Outcome.COMMIT and entry.operation not in (*self.copying, *self.landed, *self.ends):
            self.copying.append(entry.operation)


class CoordinatorNode:
    """One life of a coordinator."""

    def __init__(self, index: int, incarnation: int, first_rank_node: int = 0) -> None:
        self.machine = CoordinatorMachine(incarnation, _GROUP_LIMITS)
        self.index = index
        self._first = first_rank_node

    def hear(self, mail: Mail) -> list[Mail]:
        return self._perform(self.machine.step(mail.peer, _UP.decode(mail.payload), 0.0))

    def time_out(self) -> list[Mail]:
        """The votes that are missing do not come."""
        return self._perform(self.machine.tick(_VOTE_TIMEOUT_S))

    def lose(self, peer: bytes) -> list[Mail]:
        """The connection of this peer is gone."""
        return self._perform(self.machine.gone(peer, 0.0))

    def waits_for_votes(self) -> bool:
        return any(len(group.stream) for group in self.machine.groups.values())

    def peers(self) -> list[bytes]:
        return [peer for group in self.machine.groups.values() for peer in group.membership.peers]

    def _perform(self, effects: list[CoordinatorEffect]) -> list[Mail]:
        mails = []
        for effect in effects:
            if isinstance(effect, Send) and not isinstance(effect.message, Waiting) and not _is_small_talk(effect):
                payload = encode(effect.message)
                mails += [Mail(int(peer.split(b"/", 1)[0]), peer, payload) for peer in effect.peers]
        return mails


def _is_small_talk(effect: Send) -> bool:
    """An answer to a heartbeat that tells nothing: no rank can lack entries when there are none."""
    return isinstance(effect.message, Alive) and not effect.message.probe and not effect.message.sequence


Node = RankNode | CoordinatorNode


def thaw(snapshot: bytes) -> Node:
    """The node that was written down."""
    node = pickle.loads(snapshot)
    assert isinstance(node, RankNode | CoordinatorNode)
    return node
