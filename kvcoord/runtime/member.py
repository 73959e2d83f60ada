"""A group member inside an engine that keeps its own pools and index: no sidecar, one thread beside the engine's.

    member = Member(config, fingerprint, events=digest.log)
    capacity = member.open(free)                         # waits until all ranks are there
    member.send(step, free, digest, votes, acks)         # never waits
    verdict = member.take(step - lag)                    # waits only if it has not come
    member.close()

Heartbeats, deadlines and connecting live on the member's thread, so they go on while the engine computes. On one node
(`unix://`) the engine's thread speaks to the coordinator itself, and waits on that socket itself: see `member_loop`.
Nothing here knows what is voted on.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Container, Sequence
from typing import Any, Final, TypeVar
from weakref import WeakSet

import uvloop

from kvcoord.config.process import WorkerConfig
from kvcoord.domain import DivergencePolicy
from kvcoord.errors import ConfigError, DeadlineExceeded, UsageError
from kvcoord.protocol.messages import Ack, Decision, Verdict, Vote
from kvcoord.protocol.rank import RankState
from kvcoord.runtime.board import Board
from kvcoord.runtime.member_loop import EventLog, MemberLoop, as_known
from kvcoord.transport.link import BorrowedConnection

Key = TypeVar("Key", int, str)

_MARGIN_S: Final = 5.0
"""How much later than the machine's own deadlines a wait gives up: then the member's thread itself does not answer."""


class Member:
    """One rank's place in its group, for one thread of its engine. Opened once, closed once.

    `config` needs `group` (name, world size, lag), `rank`, `coordinators`, limits and timeouts; the rest is not used.
    `fingerprint`: what all ranks must have in common. `events`: see `member_loop.EventLog`.

    Raises ConfigError for divergence=resync: only a sidecar has a cache that it can drop.
    """

    def __init__(self, config: WorkerConfig, fingerprint: dict[str, str | int], *, events: EventLog) -> None:
        policy = config.group.divergence
        if policy is DivergencePolicy.RESYNC:
            fix = "an engine that keeps its own pools and index cannot be emptied under its requests: use stop or warn"
            raise ConfigError("group.divergence", policy.value, fix)
        self.config = config
        self._fingerprint = fingerprint
        self._events = events
        self._board = Board()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened = threading.Event()
        self._inner: MemberLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        timeouts = config.timeouts
        self._join_limit_s = timeouts.join_timeout_s + _MARGIN_S
        self._wait_limit_s = (
            timeouts.round_timeout_s + timeouts.heartbeat_timeout_s + timeouts.group_deadline_s + _MARGIN_S
        )

    def open(self, free: Sequence[int]) -> Sequence[int]:
        """Joins with these free counts per pool and returns the agreed ones: the smallest of all ranks.

        Raises JoinRefused, GroupLost after the join timeout, ConfigError for an address that cannot be used.
        """
        if self._thread is not None:
            raise UsageError("member", self.config.rank, "is open already: make another one")
        _OPENED.add(self)
        self._thread = threading.Thread(
            target=self._run, args=(list(free),), name=f"kvcoord-rank{self.config.rank}", daemon=True
        )
        self._thread.start()
        if not self._board.wait_begun(time.monotonic() + self._join_limit_s):
            raise DeadlineExceeded("group", "join_timeout_s", self._join_limit_s)
        self._opened.wait(self._join_limit_s)
        capacity = self._board.capacity
        return [] if capacity is None else capacity

    def close(self) -> None:
        """Leaves the group and ends the thread. Harmless when it is not open. Never waits longer than it may."""
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None:
            return
        self._thread = None
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        thread.join(self.config.timeouts.shutdown_timeout_s)

    @property
    def state(self) -> str:
        """How this rank stands in its group, as `RankState` names it. For display: it may change at any moment."""
        inner = self._inner
        return RankState.JOINING if inner is None else inner.machine.state

    # --- each step ------------------------------------------------------------------------------------------------

    def send(self, step: int, free: list[int], digest: int, votes: list[Vote], acks: list[Ack]) -> None:
        """Hands over the frame of this step. Never waits. Raises why the membership is over, if it is."""
        inner = self._inner
        if inner is None or self._board.failure is not None:
            inner = self._opened_loop()
        inner.send(step, free, digest, votes, acks)

    @property
    def verdicts(self) -> dict[int, Verdict]:
        """Those that have come and were not taken, by round: what is there may be popped instead of taken.

        The same object for the whole life of the member. Empty once the membership is over.
        """
        return self._board.verdicts

    def take(self, round_number: int) -> Verdict:
        """The verdict of this round, once.

        Raises GroupLost or Diverged with the cause, DeadlineExceeded when even the member's thread does not answer.
        """
        board = self._board
        verdict = board.verdicts.pop(round_number, None)
        if verdict is not None:
            board.raise_failure()
            return verdict
        give_up_at = time.monotonic() + self._wait_limit_s
        self._read(self._opened_loop().borrow(), board.verdicts, round_number, give_up_at)
        verdict = board.take_verdict(round_number, give_up_at)
        if verdict is None:
            raise DeadlineExceeded(f"verdict {round_number}", "group_deadline_s", self._wait_limit_s)
        return verdict

    def decide(self, vote: Vote) -> Decision:
        """Votes and waits for the decision: one round trip, and every other participant has to vote as well.

        Raises as `take`.
        """
        board, inner, operation = self._board, self._opened_loop(), vote.operation
        give_up_at = time.monotonic() + self._wait_limit_s
        board.want(operation)
        self._read(inner.ask(vote), board.decisions, operation, give_up_at)
        decision = board.take_decision(operation, give_up_at)
        if decision is None:
            raise DeadlineExceeded(f"decision of {operation}", "group_deadline_s", self._wait_limit_s)
        return decision

    def _read(self, link: BorrowedConnection | None, posted: Container[Key], key: Key, give_up_at: float) -> None:
        """Reads a borrowed link until `key` is posted, as long as something may come this way; then gives it back."""
        if link is None:
            return
        board = self._board
        try:
            while key not in posted and board.failure is None:
                remaining_s = give_up_at - time.monotonic()
                if remaining_s <= 0 or not link.pump(remaining_s):
                    return
        finally:
            link.give_back()

    def _opened_loop(self) -> MemberLoop:
        """Raises why the membership is over, if it is, and UsageError when it was not opened in this process."""
        self._board.raise_failure()
        if self._inner is None:
            raise UsageError("member", self.config.rank, "is not open in this process: make another one and open it")
        return self._inner

    # --- the member's thread --------------------------------------------------------------------------------------

    def _run(self, free: list[int]) -> None:
        try:
            with self._runner:
                self._runner.run(self._serve(free))
        except Exception as error:
            self._board.fail(as_known(error))

    async def _serve(self, free: list[int]) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._raised)
        inner = MemberLoop(self.config, self._fingerprint, free, self._events, self._board)
        self._inner = inner
        await inner.open()
        self._opened.set()
        try:
            await self._stop.wait()
        finally:
            await inner.close()

    def _raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: what the machine holds cannot be trusted any more, and the engine learns why."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, Exception):
            fail = self._board.fail if self._inner is None else self._inner.fail
            fail(as_known(error))


_OPENED: Final[WeakSet[Member]] = WeakSet()


def _forget_in_child() -> None:
    """A forked child has no thread of these members and shares their sockets: there they are not open."""
    for member in list(_OPENED):
        member._thread = member._inner = None


os.register_at_fork(after_in_child=_forget_in_child)
