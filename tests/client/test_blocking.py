"""The blocking client against a worker in another thread that goes through a script."""

import msgspec
import pytest

import kvcoord
from kvcoord.client import BlockingLease, PendingOutcome
from kvcoord.client.registration import geometries_of
from kvcoord.domain import Agreement, Path, Reason, Tier
from kvcoord.errors import GroupLost, TransferFailed, UsageError
from kvcoord.memory.shared import SharedHandle, attach
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Advance,
    Advanced,
    Agree,
    Agreed,
    Allocate,
    Allocated,
    Answer,
    Call,
    Done,
    Evict,
    Evicted,
    Failed,
    Free,
    LoadBack,
    Loaded,
    Match,
    Matched,
    Outcome,
    Register,
    Release,
    Status,
    StatusBody,
    WriteThrough,
    Written,
)
from tests.client.scripted import Engine, scripted
from tests.client.values import INFO, A, B, C, aborted, acquired, committed

ADVANCED = Advanced(5, 4, [], ["load-back/1/0"], [("write-through/1/0", Reason.COPY_FAILED, 2)], 3)
SNAPSHOT = WorkerSnapshot(version="1", incarnation="i", uptime_s=1.0, ready=True, group="g", rank=1, state="active")


def test_a_step_is_one_message_each_way(address: str) -> None:
    steps: list[list[Call]] = []

    def script(engine: Engine) -> None:
        engine.open()
        engine.answer((engine.expect(Acquire)[0], acquired(7, device_pages=2)))
        calls = engine.calls()
        steps.append([call for _, call in calls])
        written, released, advanced, granted = (number for number, _ in calls)
        engine.answer(
            (granted, acquired(8)),
            (advanced, ADVANCED),
            (released, Done()),
            (written, Written(None, "write-through/9/0", 1)),
        )
        engine.answer((engine.expect(Release)[0], Done()))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        lease = cache.acquire([A, B, C])
        assert (lease.number, lease.slots, lease.device_pages) == (7, [[4, 5, 6]], 2)
        pending, none, verdict, following = cache.flush_wait(
            [
                cache.write_lease_nowait(lease),
                cache.release_nowait(lease),
                cache.advance_nowait(5),
                cache.acquire_nowait([A]),
            ]
        )
        assert not pending.done()
        assert none is None
        assert verdict == ADVANCED
        assert following.number == 8
        following.release()
        following.release()
    assert steps == [[WriteThrough(lease=7, deferred=True), Release(7), Advance(5), Acquire(A)]]


ASKED: list[tuple[Call, Answer]] = [
    (Match(A + B), Matched(1, 2)),
    (Allocate(2), Allocated(committed("allocate/1/0"), [[8, 9]])),
    (Free([[4, 5]]), Done()),
    (WriteThrough(A + B, [[7]], 0, "op"), Written(aborted("write-through/2/0"), "write-through/2/0", 1)),
    (LoadBack(A, [[3]]), Loaded(committed("load-back/3/0"), "load-back/3/0", 0)),
    (Advance(5), ADVANCED),
    (Evict(Tier.HOST, 9), Evicted(6)),
    (Agree("batch/1", True, Agreement.MIN, 0b11, 4), Agreed(committed("batch/1"))),
    (Status(), StatusBody(msgspec.json.encode(SNAPSHOT))),
]


def test_each_call_travels_as_it_was_asked_and_returns_what_was_answered(address: str) -> None:
    asked: list[Call] = []

    def script(engine: Engine) -> None:
        engine.open()
        for _, answer in ASKED:
            ((number, call),) = engine.calls()
            asked.append(call)
            engine.answer((number, answer))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        assert cache.info == INFO
        match = cache.match([A, B])
        assert (match.device_pages, match.host_pages, match.pages) == (1, 2, 3)
        assert cache.allocate(2).slots == [[8, 9]]
        cache.free([4, 5])
        assert cache.write_through([A, B], [7], operation="op") == aborted("write-through/2/0")
        load = cache.load_back([A], [3])
        load.wait()
        assert (bool(load), load.pages) == (True, 0)
        assert cache.advance(5) == ADVANCED
        assert cache.evict("host", 9) == 6
        vote = cache.agree("batch/1", True, agreement=Agreement.MIN, value=4, participants=[0, 1])
        assert vote == committed("batch/1")
        assert cache.status() == SNAPSHOT
    assert asked == [call for call, _ in ASKED]


def test_waiting_for_one_ticket_takes_in_what_is_answered_for_the_others(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        first, second, third = (number for number, _ in engine.calls())
        engine.answer((third, Matched(3, 0)))
        engine.answer((second, Matched(2, 0)), (first, Matched(1, 0)))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        tickets = [cache.match_nowait([key]) for key in (A, B, C)]
        assert not any(ticket.done() for ticket in tickets)
        assert tickets[0].wait().pages == 1
        assert all(ticket.done() for ticket in tickets)
        assert [ticket.wait().pages for ticket in tickets] == [1, 2, 3]
        assert cache.flush_wait([]) == []


def test_flush_sends_without_waiting(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        first, _ = engine.expect(Match)
        second, _ = engine.expect(Advance)
        engine.answer((second, ADVANCED), (first, Matched(1, 0)))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        ticket = cache.match_nowait([A])
        cache.flush()
        cache.flush()
        assert cache.advance(5) == ADVANCED
        assert ticket.wait().pages == 1


def test_a_failure_is_raised_by_its_ticket_and_by_no_other(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        first, second = (number for number, _ in engine.calls())
        engine.answer((second, Matched(1, 0)), (first, Failed("GroupLost", ["g", "rank 2 is missing", 60.0])))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        lost, fine = cache.advance_nowait(1), cache.match_nowait([A])
        for _ in range(2):
            with pytest.raises(GroupLost, match="rank 2 is missing"):
                cache.flush_wait([lost, fine])
        assert fine.wait().pages == 1


def test_outcomes_come_with_a_later_advance(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        write, lease_write, vote = (number for number, _ in engine.calls())
        engine.answer(
            (write, Written(None, "write-through/4/0", 1)),
            (lease_write, Written(committed("write-through/5/0"), "write-through/5/0", 1)),
            (vote, Agreed(None)),
        )
        outcomes: list[Outcome] = [aborted("batch/1"), committed("write-through/4/1", Path.VOTED)]
        engine.answer((engine.expect(Advance)[0], Advanced(2, 1, outcomes, [], [], 1)))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        lease = BlockingLease(acquired(7), (), cache, 1, cache._channel)
        tickets = [
            cache.write_through_nowait([A], [1], deferred=True),
            cache.write_lease_nowait(lease),
            cache.agree_nowait("batch/1", False, reason="busy", deferred=True),
        ]
        write, lease_write, vote = cache.flush_wait(tickets)
        assert [pending.done() for pending in (write, lease_write, vote)] == [False, True, False]
        cache.advance(2)
        assert write.result() == committed("write-through/4/1", Path.VOTED)
        assert lease_write.result() == committed("write-through/5/0")
        assert vote.result() == aborted("batch/1")
        lease.released = True


def test_what_is_put_off_though_not_deferred_says_that_it_needs_a_later_advance(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        engine.answer((engine.expect(WriteThrough)[0], Written(None, "write-through/4/0", 1)))
        engine.answer((engine.expect(Agree)[0], Agreed(None)))
        write, _ = engine.expect(WriteThrough)
        engine.answer((write, Written(None, "write-through/5/0", 1)))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        with pytest.raises(UsageError, match="later advance"):
            cache.write_through([A], [1])
        with pytest.raises(UsageError, match="later advance"):
            cache.agree("batch/1", True)
        assert isinstance(cache.write_through([A], [1], deferred=True), PendingOutcome)


def test_layers_are_waited_for_one_by_one_and_a_failed_copy_fails_at_its_layer(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        engine.answer((engine.expect(Acquire)[0], acquired(7, host_pages=1, loaded=[(0, 1)])))
        engine.landed("load-back/7/0", 1)
        engine.landed("load-back/7/0", 3)
        engine.answer((engine.expect(Release)[0], Done()))
        load, _ = engine.expect(LoadBack)
        engine.landed("load-back/8/0", 1)
        engine.answer((load, Loaded(committed("load-back/8/0"), "load-back/8/0", 2)))
        engine.landed("load-back/8/0", 1, "boom")

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        with cache.acquire([A, B, C], landed=False) as lease:
            lease.layer(0)
            lease.layer(2)
            lease.landed()
        assert lease.released
        load = cache.load_back([A, B], [1, 2])
        load.layer(0)
        with pytest.raises(TransferFailed, match="layer 1: boom"):
            load.layer(1)
        with pytest.raises(TransferFailed):
            load.wait()
        assert load.error == "boom"


def test_an_aborted_lease_holds_nothing_and_sends_no_release(address: str) -> None:
    answer = Acquired(aborted("allocate/7/0", Reason.DEVICE_FULL), 0, 1, 1, [], [], "allocate/7/0")

    def script(engine: Engine) -> None:
        engine.open()
        engine.answer((engine.expect(Acquire)[0], answer))
        with pytest.raises(EOFError):
            engine.calls()

    with scripted(address, script), kvcoord.connect_blocking(address) as cache, cache.acquire([A]) as lease:
        assert not lease
        assert lease.device_pages == 1
        with pytest.raises(UsageError, match="aborted"):
            lease.layer(0)
        with pytest.raises(UsageError, match="not held"):
            lease.write_through()


def test_bad_arguments_are_refused_before_anything_is_queued(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        with pytest.raises(EOFError):
            engine.calls()

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        for bad in (
            lambda: cache.match_nowait([]),
            lambda: cache.acquire_nowait([b"short"]),
            lambda: cache.allocate_nowait(-1),
            lambda: cache.free_nowait([99]),
            lambda: cache.write_through_nowait([A], [1, 2]),
            lambda: cache.load_back_nowait([A], [[1], [2]]),
            lambda: cache.advance_nowait(-1),
            lambda: cache.evict_nowait("disk", 1),
            lambda: cache.agree_nowait("", True),
        ):
            with pytest.raises(UsageError):
                bad()


def test_a_registered_engine_and_its_worker_see_the_same_pages(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        number, refused = engine.expect(Register)
        engine.answer((number, Failed("UsageError", ["session", 2, "another engine is connected"])))
        number, call = engine.expect(Register)
        (memory,) = call.memory
        assert memory.inode != refused.memory[0].inode
        geometry = geometries_of(INFO)[0]
        assert memory.pool == geometry.name
        handle = SharedHandle(memory.pid, memory.fd, memory.inode, memory.size_bytes, geometry, INFO.device_pages)
        with attach(handle) as pages:
            pages.view(2, 15)[:] = b"x" * 64
        engine.answer((number, Done()))

    with scripted(address, script):
        with kvcoord.connect_blocking(address) as cache:
            with pytest.raises(UsageError, match="another engine"):
                cache.register()
            assert cache.device == []
            cache.register()
            kept = cache.device[0]
            assert bytes(kept.view(2, 15)) == b"x" * 64
        assert kept.closed
