"""The session without a socket: packing, order, lateness, what is given back, what ends it."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.client import reading
from kvcoord.client.progress import Landing, PendingOutcome
from kvcoord.client.results import GrantedLease, expect
from kvcoord.client.session import Asked, Session
from kvcoord.domain import Committed, Path
from kvcoord.errors import (
    DeadlineExceeded,
    Diverged,
    FrameMalformed,
    GroupLost,
    KvcoordError,
    PeerUnavailable,
    UsageError,
)
from kvcoord.protocol.codec import Decoder, encode
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
    Answers,
    Call,
    Done,
    Failed,
    Free,
    FromEngine,
    Landed,
    Match,
    Matched,
    Opened,
    Outcome,
    Release,
    Status,
    StatusBody,
    WriteThrough,
    Written,
)
from tests.client.values import INFO, A, aborted, acquired, committed


class Probe(Asked[Any]):
    """A caller that remembers, and can be gone."""

    def __init__(self, call: Call, read: Any, landing: Landing | None = None, *, gone: bool = False) -> None:
        super().__init__(call, read, landing)
        self.results: list[object] = []
        self.errors: list[KvcoordError] = []
        self.gone = gone

    def settle(self, result: object) -> bool:
        if self.gone:
            return False
        self.results.append(result)
        return True

    def fail(self, error: KvcoordError) -> None:
        self.errors.append(error)


class Rig:
    """A session whose messages are decoded."""

    closed = True

    def __init__(self, *, message_bytes_max: int = 1 << 20, calls_open_max: int = 1000) -> None:
        self.session = Session("ipc:///w", message_bytes_max, calls_open_max)
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)

    def ask(self, call: Call, read: Any = reading.read_done, *, gone: bool = False) -> Probe:
        landing = Landing(3) if isinstance(call, Acquire) else None
        probe = Probe(call, read, landing, gone=gone)
        self.session.ask(probe)
        return probe

    def match(self, key: bytes = A) -> Probe:
        return self.ask(Match(key), reading.read_match)

    def acquire(self, *, landed: bool = False, gone: bool = False) -> Probe:
        return self.ask(Acquire(A, landed), self._lease, gone=gone)

    def write(self) -> Probe:
        return self.ask(WriteThrough(A, [[1]], deferred=True), self._pending)

    def agree(self, operation: str) -> Probe:
        return self.ask(Agree(operation, True, deferred=True), self._pending)

    def advance(self) -> Probe:
        return self.ask(Advance(1), reading.read_advanced)

    def sent(self) -> list[list[tuple[int, Call]]]:
        return [self._decoder.decode(payload).calls for payload in self.session.outgoing()]

    def answer(self, *answers: tuple[int, Answer]) -> None:
        self.session.receive(encode(Answers(list(answers))))

    def landed(self, operation: str, layers: int, error: str = "") -> None:
        self.session.receive(encode(Landed(operation, layers, error)))

    def _lease(self, asked: Asked[Any], answer: Answer) -> GrantedLease:
        found = expect(answer, Acquired)
        return GrantedLease(found, self.session.landings(asked, found), self)

    def _pending(self, asked: Asked[Any], answer: Answer) -> PendingOutcome:
        operation, outcome, exact = reading.decided(asked, answer)
        pending = PendingOutcome(operation, outcome)
        self.session.pending(pending, exact=exact)
        return pending


def advanced(*outcomes: Outcome) -> Advanced:
    return Advanced(1, 0, list(outcomes), [], [], 0)


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
    rig.session.give_back(GrantedLease(acquired(5), (), rig))
    assert rig.sent() == [[(2, Release(5))]]


# --- outcomes of a later round ----------------------------------------------------------------------------------------


def test_a_deferred_write_takes_its_outcome_from_whatever_attempt_was_the_last() -> None:
    rig = Rig()
    rig.write()
    write = rig.write()
    rig.advance()
    rig.answer((1, Written(None, "write-through/7/0", 1)), (2, Written(None, "write-through/17/0", 1)))
    pending = write.results[0]
    assert isinstance(pending, PendingOutcome)
    assert not pending.done()
    with pytest.raises(UsageError, match="later advance"):
        pending.result()
    rig.answer((3, advanced(committed("write-through/17/1"))))
    assert pending.done()
    assert pending.result() == committed("write-through/17/1")
    assert pending


def test_votes_of_the_engines_own_are_matched_by_their_whole_id() -> None:
    rig = Rig()
    first, second = rig.agree("batch/3"), rig.agree("batch/4")
    rig.advance()
    rig.answer((1, Agreed(None)), (2, Agreed(None)))
    rig.answer((3, advanced(aborted("batch/4"), committed("batch/3"))))
    assert first.results[0].result() == committed("batch/3")  # type: ignore[attr-defined]
    assert second.results[0].result() == aborted("batch/4")  # type: ignore[attr-defined]
    assert not second.results[0]


def test_a_write_that_is_decided_at_once_is_done() -> None:
    rig = Rig()
    write = rig.write()
    rig.answer((1, Written(committed("write-through/7/0"), "write-through/7/0", 1)))
    assert write.results[0].result() == committed("write-through/7/0")  # type: ignore[attr-defined]


def test_an_outcome_that_comes_before_the_answer_to_its_call_is_not_lost() -> None:
    rig = Rig()
    write, vote = rig.write(), rig.agree("batch/3")
    rig.advance()
    rig.answer((3, advanced(committed("write-through/9/1"), aborted("batch/3"))))
    rig.answer((2, Agreed(None)))
    rig.answer((1, Written(None, "write-through/9/0", 1)))
    assert write.results[0].result() == committed("write-through/9/1")  # type: ignore[attr-defined]
    assert vote.results[0].result() == aborted("batch/3")  # type: ignore[attr-defined]


def test_an_outcome_that_nobody_asked_for_is_not_taken_for_a_later_one() -> None:
    rig = Rig()
    rig.write()
    rig.advance()
    rig.answer((2, advanced(aborted("write-back/9/0"), aborted("write-through/9/0"))))
    rig.answer((1, Written(None, "write-through/1/0", 1)))
    later = rig.write()
    rig.answer((3, Written(None, "write-through/9/0", 1)))
    assert not later.results[0].done()  # type: ignore[attr-defined]


def test_outcomes_are_taken_in_even_when_nobody_waits_for_the_advance() -> None:
    rig = Rig()
    write = rig.write()
    rig.ask(Advance(1), reading.read_advanced, gone=True)
    rig.answer((1, Written(None, "write-through/9/0", 1)), (2, advanced(committed("write-through/9/0"))))
    assert write.results[0].done()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failed("GroupLost", ["g", "rank 2 is missing", 60.0]), GroupLost),
        (Failed("Diverged", ["g", 4, [[0], [1]], "op"]), Diverged),
    ],
)
def test_a_group_that_is_over_decides_nothing_that_is_pending(failure: Failed, kind: type[KvcoordError]) -> None:
    rig = Rig()
    write = rig.write()
    advance = rig.advance()
    rig.answer((1, Written(None, "write-through/9/0", 1)), (2, failure))
    assert isinstance(advance.errors[0], kind)
    pending = write.results[0]
    assert isinstance(pending, PendingOutcome)
    assert pending.done()
    with pytest.raises(kind):
        pending.result()


def test_a_refused_call_leaves_pending_outcomes_alone() -> None:
    rig = Rig()
    write = rig.write()
    rig.ask(Release(4))
    rig.answer((1, Written(None, "write-through/9/0", 1)), (2, Failed("UsageError", ["lease", 4, "is not held"])))
    assert not write.results[0].done()  # type: ignore[attr-defined]


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
    rig.session.give_back(GrantedLease(acquired(5), (), rig))
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


def test_a_committed_outcome_is_true_and_a_pending_one_is_not() -> None:
    assert PendingOutcome("op/1", Committed("op/1", Path.VOTED))
    assert not PendingOutcome("op/1", aborted("op/1"))
    assert not PendingOutcome("op/1")
