"""A member on a node link: the engine's thread sends and reads by itself, and its own thread sleeps meanwhile."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcoord.config import Timeouts, WorkerConfig
from kvcoord.config.group import GroupConfig
from kvcoord.domain import Agreement, OperationKind, Outcome
from kvcoord.errors import GroupLost, UsageError
from kvcoord.protocol.messages import Verdict, Vote
from kvcoord.runtime.board import Board
from kvcoord.runtime.member import Member
from kvcoord.transport.channel import Channel
from kvcoord.transport.node_connection import NodeConnection
from tests.leaks import grows, open_files, own_threads

RANKS = 2

QUIET = Timeouts(heartbeat_interval_s=100.0, heartbeat_timeout_s=300.0)
"""Nothing is said but what the engine says."""


class Calls:
    """What was done on which thread: (what, name of the thread), in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        self._monkeypatch = monkeypatch

    def record(self, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def recording(*arguments: Any) -> Any:
            self.made.append((name, threading.current_thread().name))
            return original(*arguments)

        self._monkeypatch.setattr(owner, name, recording)

    def of(self, name: str, thread: str) -> int:
        return self.made.count((name, thread))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen = Calls(monkeypatch)
    for owner, name in ((Channel, "send"), (Channel, "wait"), (NodeConnection, "_woken")):
        seen.record(owner, name)
    return seen


def make(folder: Path, rank: int, *, timeouts: Timeouts = QUIET, **options: Any) -> Member:
    config = WorkerConfig(
        group=GroupConfig(world_size=RANKS),
        rank=rank,
        coordinators=[f"unix://{folder}/c.sock"],
        embed_coordinator=True,
        timeouts=timeouts,
        **options,
    )
    return Member(config, {}, events=lambda: [("", 0)])


@contextmanager
def engines(folder: Path, **options: Any) -> Iterator[Callable[[Callable[[Member, int], Any]], list[Any]]]:
    """A thread for each rank, named engine0 and engine1: runs one function on all of them and returns the results."""
    members = [make(folder, rank, **options) for rank in range(RANKS)]
    with ExitStack() as stack:
        for one in reversed(members):
            stack.callback(one.close)
        threads = [stack.enter_context(ThreadPoolExecutor(1, f"engine{rank}")) for rank in range(RANKS)]

        def run(act: Callable[[Member, int], Any]) -> list[Any]:
            futures = [threads[rank].submit(act, members[rank], rank) for rank in range(RANKS)]
            return [future.result() for future in futures]

        run(lambda one, _: one.open([10]))
        yield run


def decide(one: Member, name: str, value: int = 1) -> Any:
    decision = one.decide(Vote(name, OperationKind.CUSTOM, True, Agreement.MIN, value=value))
    return decision.outcome, decision.value


def test_a_decision_is_one_send_and_one_wait_of_the_engine_and_wakes_no_other_thread(
    tmp_path: Path, calls: Calls
) -> None:
    count = 50
    with engines(tmp_path) as run:
        run(lambda one, _: decide(one, "warm"))
        calls.made.clear()
        agreed = run(lambda one, rank: [decide(one, f"op/{number}", rank + 3) for number in range(count)])
        made = calls.made.copy()
    assert agreed == [[(Outcome.COMMIT, 3)] * count] * RANKS
    calls.made = made
    for rank in range(RANKS):
        assert calls.of("send", f"engine{rank}_0") == count
        assert calls.of("wait", f"engine{rank}_0") == count
        assert calls.of("_woken", f"kvcoord-rank{rank}") == 0


def test_a_frame_is_one_send_of_the_engine(tmp_path: Path, calls: Calls) -> None:
    count = 50

    def steps(one: Member, _: int) -> None:
        for number in range(count):
            one.send(number, [10], 1, [Vote(f"op/{number}", OperationKind.CUSTOM, True)], [])
            assert one.take(number).decisions[0].outcome is Outcome.COMMIT

    with engines(tmp_path) as run:
        calls.made.clear()
        run(steps)
        made = calls.made.copy()
    calls.made = made
    assert [calls.of("send", f"engine{rank}_0") for rank in range(RANKS)] == [count, count]


def test_a_verdict_that_came_while_the_engine_computed_was_read_by_the_members_own_thread(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = threading.Semaphore(0)
    post = Board.post_verdict

    def posting(board: Board, verdict: Verdict) -> None:
        post(board, verdict)
        posted.release()

    monkeypatch.setattr(Board, "post_verdict", posting)
    with engines(tmp_path) as run:
        run(lambda one, _: one.send(0, [10], 1, [], []))
        assert all(posted.acquire(timeout=30) for _ in range(RANKS))
        calls.made.clear()
        assert [verdict.round for verdict in run(lambda one, _: one.take(0))] == [0, 0]
        assert calls.made == []


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once an engine has put its vote and is about to wait for the answer."""
    event = threading.Event()
    wait = Channel.wait

    def waiting(channel: Channel, timeout_s: float) -> bytes | None:
        event.set()
        return wait(channel, timeout_s)

    monkeypatch.setattr(Channel, "wait", waiting)
    return event


def test_closing_a_member_ends_the_wait_of_its_engine(tmp_path: Path, waits: threading.Event) -> None:
    members: dict[int, Member] = {}

    def engine(one: Member, rank: int) -> str:
        members[rank] = one
        if rank:
            assert waits.wait(30)
            members[0].close()
            return ""
        with pytest.raises(GroupLost) as raised:
            decide(one, "alone")
        return raised.value.cause

    with engines(tmp_path) as run:
        assert run(engine)[0] == "this member was closed"


def test_a_rank_that_leaves_ends_a_decision_of_the_other_with_an_abort(tmp_path: Path, waits: threading.Event) -> None:
    def engine(one: Member, rank: int) -> Any:
        if rank:
            assert waits.wait(30)
            one.close()
            return None
        return decide(one, "alone")[0]

    with engines(tmp_path) as run:
        assert run(engine)[0] is Outcome.ABORT


def test_a_forked_child_is_refused_and_does_not_disturb_the_member(tmp_path: Path) -> None:
    def fork(one: Member, rank: int) -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        code = 1
        try:
            decide(one, "in the child")
        except UsageError:
            one.close()
            code = 0
        finally:
            os._exit(code)

    with engines(tmp_path) as run:
        assert run(fork) == [0, 0]
        assert run(lambda one, _: decide(one, "after")) == [(Outcome.COMMIT, 1)] * RANKS


def test_members_leave_no_thread_and_no_descriptor_behind(tmp_path: Path) -> None:
    def life() -> None:
        with engines(tmp_path) as run:
            run(lambda one, _: decide(one, "op"))

    gc.collect()  # What other tests have left behind is not counted.
    before, files = own_threads(), []
    for _ in range(8):
        life()
        assert own_threads() == before
        files.append(len(open_files()))
    assert not grows(files)
