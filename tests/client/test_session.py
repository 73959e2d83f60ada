"""The session without a socket: packing, order, lateness, what is given back, what ends it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.client import reading
from kvcoord.client.results import GrantedLease
from kvcoord.errors import (
    DeadlineExceeded,
    FrameMalformed,
    PeerUnavailable,
    UsageError,
)
from kvcoord.protocol.codec import encode
from kvcoord.protocol.local import (
    Acquired,
    Advance,
    Allocate,
    Allocated,
    Answers,
    Done,
    Failed,
    Free,
    Match,
    Matched,
    Opened,
    Release,
    Status,
    StatusBody,
    Written,
)
from tests.client.rig import Probe, Rig
from tests.client.values import INFO, A, aborted, acquired, committed

# --- packing and order ------------------------------------------------------------------------------------------------


def test_calls_of_one_moment_travel_as_one_message_in_order() -> None:
    rig = Rig()
    assert rig.sent() == []
    rig.match()
    rig.ask(Release(4))
    rig.advance()
    assert rig.sent() == [[(1, Match(A)), (2, Release(4)), (3, Advance(1))]]
    assert not rig.session.queued
    rig.match()
    assert rig.sent() == [[(4, Match(A))]]


def test_what_is_too_long_for_one_message_is_split_and_stays_in_order() -> None:
    rig = Rig(message_bytes_max=200)
    for number in range(1, 40):
        rig.match(bytes([number]) * 16)
    messages = rig.sent()
    assert len(messages) > 1
    assert [number for calls in messages for number, _ in calls] == list(range(1, 40))


def test_a_call_that_is_too_long_alone_fails_alone() -> None:
    rig = Rig(message_bytes_max=200)
    first, long, last = rig.match(), rig.match(bytes(400)), rig.match()
    assert [number for calls in rig.sent() for number, _ in calls] == [1, 3]
    assert isinstance(long.errors[0], UsageError)
    assert "message_bytes_max=200" in str(long.errors[0])
    rig.answer((1, Matched(1, 0)), (3, Matched(3, 0)))
    assert (len(first.results), len(last.results), rig.session.calls_open) == (1, 1, 0)


@given(st.permutations(range(1, 9)), st.lists(st.integers(0, 8), max_size=4), st.lists(st.integers(0, 8), max_size=4))
def test_results_depend_neither_on_packing_nor_on_the_order_of_answers(
    order: list[int], sent_after: list[int], cuts: list[int]
) -> None:
    rig = Rig()
    probes = []
    for number in range(8):
        probes.append(rig.match())
        if number in sent_after:
            rig.session.outgoing()
    rig.session.outgoing()
    bounds = sorted({0, *cuts, 8})
    for start, end in pairwise(bounds):
        rig.answer(*[(number, Matched(number, 2 * number)) for number in order[start:end]])
    found = [(probe.results[0].device_pages, probe.results[0].host_pages) for probe in probes]  # type: ignore[attr-defined]
    assert found == [(number, 2 * number) for number in range(1, 9)]
    assert all(len(probe.results) == 1 for probe in probes)
    assert rig.session.calls_open == 0


def test_an_answer_to_no_open_call_changes_nothing_and_is_counted() -> None:
    rig = Rig()
    probe = rig.match()
    rig.answer((9, Matched(1, 1)), (1, Matched(2, 0)))
    rig.answer((1, Matched(3, 0)))
    assert len(probe.results) == 1
    assert rig.session.answers_unasked == 2
    assert not rig.session.lost


def test_calls_beyond_the_limit_are_refused_and_the_others_unharmed() -> None:
    rig = Rig(calls_open_max=2)
    probe, _ = rig.match(), rig.match()
    with pytest.raises(PeerUnavailable, match="calls_open_max=2"):
        rig.match()
    rig.answer((1, Matched(1, 0)))
    assert probe.results
    rig.match()


# --- what nobody wants any more ---------------------------------------------------------------------------------------


def test_a_lease_that_nobody_waits_for_is_released() -> None:
    rig = Rig()
    rig.acquire(gone=True)
    rig.sent()
    rig.answer((1, acquired(7)))
    assert rig.sent() == [[(2, Release(7))]]
    rig.answer((2, Done()))
    assert rig.session.calls_open == 0
    assert not rig.session.lost


def test_slots_that_nobody_waits_for_are_freed() -> None:
    rig = Rig()
    rig.ask(Allocate(2), reading.read_allocation, gone=True)
    rig.sent()
    rig.answer((1, Allocated(committed("allocate/1/0"), [[3, 4]])))
    assert rig.sent() == [[(2, Free([[3, 4]]))]]


def test_nothing_is_given_back_for_what_was_aborted_or_not_held() -> None:
    rig = Rig()
    rig.acquire(gone=True)
    rig.ask(Allocate(2), reading.read_allocation, gone=True)
    rig.ask(Match(A), reading.read_match, gone=True)
    rig.sent()
    rig.answer(
        (1, Acquired(aborted("allocate/1/0"), 0, 1, 0, [], [], "allocate/1/0")),
        (2, Allocated(aborted("allocate/2/0"), [])),
        (3, Matched(1, 0)),
    )
    assert rig.sent() == []


def test_giving_back_is_not_refused_by_the_limit_of_calls() -> None:
    rig = Rig(calls_open_max=1)
    rig.acquire(gone=True)
    rig.sent()
    rig.session.give_back(GrantedLease(acquired(5), (), rig, 1))
    assert rig.sent() == [[(2, Release(5))]]


# --- the end of a session ---------------------------------------------------------------------------------------------


def test_a_lost_worker_fails_all_that_waits_and_all_that_comes() -> None:
    rig = Rig()
    write = rig.write()
    rig.answer((1, Written(None, "write-through/9/0", 1)))
    probes = [rig.match(), rig.acquire()]
    rig.session.lose("closed by the peer")
    rig.session.lose("a second time")
    for probe in probes:
        assert [str(error) for error in probe.errors] == ["ipc:///w: closed by the peer"]
    assert probes[0].errors[0] is not probes[1].errors[0]
    with pytest.raises(PeerUnavailable):
        write.results[0].result()  # type: ignore[attr-defined]
    with pytest.raises(PeerUnavailable, match="closed by the peer"):
        rig.match()
    rig.session.give_back(GrantedLease(acquired(5), (), rig, 1))
    assert rig.sent() == []


GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "random": b"\x01\xff\x00garbage",
    "another version": b"\x63" + encode(Answers([]))[1:],
    "a call instead of an answer": encode(Match(A)),
    "the wrong answer": encode(Answers([(1, Done())])),
    "a message that it could not read": encode(Answers([(0, Failed("FrameMalformed", ["truncated", 3]))])),
}


@pytest.mark.parametrize("payload", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_worker_that_makes_no_sense_ends_the_session_and_says_why(payload: bytes) -> None:
    rig = Rig()
    probe, other = rig.match(), rig.match()
    rig.session.receive(payload)
    assert rig.session.lost
    for each in (probe, other):
        assert len(each.errors) == 1
        assert isinstance(each.errors[0], PeerUnavailable)
    rig.answer((2, Matched(1, 1)))
    assert not other.results


def test_a_status_that_cannot_be_read_ends_the_session() -> None:
    rig = Rig()
    probe = rig.ask(Status(), reading.read_status)
    rig.answer((1, StatusBody(b"{}")))
    assert isinstance(probe.errors[0], PeerUnavailable)
    assert "status cannot be read" in rig.session.lost


def test_a_group_needs_a_shape_for_every_pool() -> None:
    lame = Opened("g", 0, 1, 1, ["kv"], [64], [], ["int8"], 1, 1, 1, True)
    for bad in (lame, Opened("g", 0, 1, 1, [], [], [], [], 1, 1, 1, True)):
        with pytest.raises(FrameMalformed):
            reading.read_opened(Probe(Match(A), None), bad)
    assert reading.read_opened(Probe(Match(A), None), INFO) is INFO


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_calls_fail_at_their_deadline_and_their_late_answers_are_still_taken_in() -> None:
    rig = Rig()
    late, early = rig.acquire(), rig.match()
    late.deadline, early.deadline = 10.0, 12.0
    assert rig.session.expire(9.0, 5.0) == 10.0
    assert late.errors == early.errors == []
    assert rig.session.expire(10.0, 5.0) == 12.0
    assert [str(error) for error in late.errors] == ["no answer to acquire within call_timeout_s=5 s"]
    assert isinstance(late.errors[0], DeadlineExceeded)
    late.gone = True
    rig.sent()
    rig.answer((1, acquired(7)))
    assert rig.sent() == [[(3, Release(7))]]
    assert rig.session.expire(11.0, 5.0) == 12.0


def test_no_open_call_needs_no_deadline() -> None:
    rig = Rig()
    probe = rig.match()
    probe.deadline = 10.0
    rig.answer((1, Matched(0, 0)))
    assert rig.session.expire(99.0, 5.0) is None
    assert probe.errors == []
