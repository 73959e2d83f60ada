import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.domain import Outcome, Reason
from kvcoord.protocol.codec import encode
from kvcoord.protocol.messages import Completion, Decision, Entry, Numbered, Report, Verdict
from kvcoord.protocol.rank_stream import RankStream, entry_bytes
from kvcoord.protocol.recovery import merge

A = Decision("a", Outcome.COMMIT, 1)
B = Decision("b", Outcome.ABORT, 2, None, Reason.BUSY, 0)
RETRACTED = Completion("c", False, False, 3, Reason.COPY_FAILED, 1)
NEW = 99


def report(*entries: Entry, history: int = 5, in_doubt: tuple[str, ...] = (), free: int = 8) -> Report:
    sequence = max((entry.sequence for entry in entries), default=0)
    retracted = [entry for entry in entries if isinstance(entry, Completion) and not entry.drained]
    return Report(history, sequence, list(entries), list(in_doubt), [], -1, retracted, [free], False)


def rounds(*numbers: int, following: int, history: int = 5) -> Report:
    verdicts = [Verdict(1, number, [], [], [8]) for number in numbers]
    return Report(history, 0, [], [], verdicts, following, [], [8], True)


def test_what_any_rank_knows_is_given_to_all() -> None:
    merged = merge({1: report(A, B, free=3), 0: report(A, in_doubt=("b",))}, NEW)
    assert not merged.fresh
    assert (merged.history, merged.sequence, merged.capacity) == (5, 2, [3])
    assert merged.entries == [A, B]
    assert merged.in_doubt == []


def test_what_is_in_doubt_everywhere_is_aborted_in_the_order_of_the_lowest_rank() -> None:
    merged = merge({0: report(A, in_doubt=("y", "x")), 1: report(A, in_doubt=("x", "z", "y"))}, NEW)
    assert merged.in_doubt == ["y", "x", "z"]


def test_ranks_with_unequal_histories_begin_anew() -> None:
    merged = merge({0: report(A), 1: report(A, history=6)}, NEW)
    assert (merged.fresh, merged.history, merged.sequence, merged.entries) == (True, NEW, 0, [])
    assert merge({0: report(history=0), 1: report(history=0)}, NEW).fresh


def test_a_rank_that_cannot_be_brought_up_makes_all_begin_anew() -> None:
    far = Decision("z", Outcome.COMMIT, 9)
    assert merge({0: report(A), 1: report(A, far)}, NEW).fresh
    assert merge({0: rounds(4, 5, following=6), 1: rounds(1, following=2)}, NEW).fresh
    assert not merge({0: rounds(4, 5, following=6), 1: rounds(3, following=4)}, NEW).fresh


def test_a_rank_that_would_have_to_hold_too_many_verdicts_makes_all_begin_anew() -> None:
    """Its engine did not move from one recovery to the next, and each of them handed it more."""
    reports = {0: rounds(7, 8, following=9), 1: rounds(3, 4, 5, 6, following=7)}
    assert not merge(reports, NEW, 6).fresh
    assert merge(reports, NEW, 5).fresh


def test_a_rank_that_has_sent_no_frame_needs_no_verdict() -> None:
    merged = merge({0: rounds(4, 5, following=6), 1: rounds(following=-1)}, NEW)
    assert (merged.fresh, merged.round) == (False, 5)


def test_the_highest_verdict_counts_whoever_has_it() -> None:
    merged = merge({0: rounds(3, following=4), 1: rounds(3, 4, following=5)}, NEW)
    assert merged.round == 4
    assert [verdict.round for verdict in merged.verdicts] == [3, 4]


def test_a_retraction_is_remembered_until_it_is_drained_anywhere() -> None:
    assert merge({0: report(A, B, RETRACTED), 1: report(A, B)}, NEW).retracted == [RETRACTED]
    drained = Completion("c", False, True, 4, Reason.COPY_FAILED, 1)
    assert merge({0: report(A, B, RETRACTED, drained), 1: report(A, B, RETRACTED)}, NEW).retracted == []


def test_two_outcomes_of_one_thing_are_named_and_nothing_is_kept() -> None:
    other = msgspec.structs.replace(A, outcome=Outcome.ABORT)
    merged = merge({0: report(A), 1: report(other), 2: report(A)}, NEW)
    assert merged.fresh
    assert merged.conflict is not None
    assert merged.conflict.sides == [[0], [1]]
    assert merged.conflict.what == "commit a (ranks 0) against abort a (ranks 1)"


def test_two_verdicts_of_one_round_are_named_but_an_older_epoch_in_one_is_not() -> None:
    first, second = rounds(3, following=4), rounds(3, following=4)
    second.verdicts[0] = msgspec.structs.replace(second.verdicts[0], epoch=2)
    assert not merge({0: first, 1: second}, NEW).fresh
    second.verdicts[0] = msgspec.structs.replace(second.verdicts[0], capacity=[1])
    conflict = merge({0: first, 1: second}, NEW).conflict
    assert conflict is not None
    assert conflict.what == "verdict 3 (ranks 0) against verdict 3 (ranks 1)"


# --- what has to go into one message ----------------------------------------------------------------------------------


def long(sequence: int, keys: int) -> Decision:
    """A decision on so many page keys."""
    return Decision(f"o{sequence}", Outcome.COMMIT, sequence, [bytes([key]) * 16 for key in range(keys)])


@given(
    st.text(min_size=1, max_size=64),
    st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.lists(st.binary(max_size=300), max_size=20)),
    st.sampled_from([None, *Reason]),
    st.dictionaries(st.text(max_size=40), st.integers(0, 2**63), max_size=4),
    st.integers(0, 2**63),
)
def test_an_entry_is_never_longer_than_is_counted_for_it(
    operation: str, value: int | list[bytes] | None, reason: Reason | None, shortfall: dict[str, int], sequence: int
) -> None:
    entries: list[Entry] = [
        Decision(operation, Outcome.ABORT, sequence, value, reason, 1 << 20, shortfall),
        Completion(operation, False, False, sequence, reason, 1 << 20),
    ]
    for entry in entries:
        assert len(encode(Numbered(0, entry))) <= entry_bytes(entry)


def test_a_rank_keeps_of_the_past_what_fits_into_a_report() -> None:
    stream = RankStream(100, 4 * entry_bytes(long(1, 10)))
    for sequence in range(1, 8):
        assert stream.take(long(sequence, 10))
    assert [entry.sequence for entry in stream.kept()] == [4, 5, 6, 7]
    assert stream.take(long(8, 30))
    assert [entry.sequence for entry in stream.kept()] == [7, 8]
    stream.begin()
    assert stream.kept() == []
    assert stream.take(long(1, 40))
    assert [entry.sequence for entry in stream.kept()] == [1]


def test_a_rank_that_lacks_more_than_a_message_holds_makes_all_begin_anew() -> None:
    entries = [long(sequence, 10) for sequence in range(1, 6)]
    behind = {0: report(*entries), 1: report(*entries[:2])}
    enough = 3 * entry_bytes(entries[0])
    assert not merge(behind, NEW, bytes_max=enough).fresh
    assert merge(behind, NEW, bytes_max=enough - 1).fresh


@pytest.mark.parametrize("votes", [1, 50])
def test_a_rank_that_would_have_to_hold_too_long_verdicts_makes_all_begin_anew(votes: int) -> None:
    decisions = [Decision(f"o{number}", Outcome.COMMIT) for number in range(votes)]
    verdict = Verdict(1, 4, decisions, [], [8])
    ahead = Report(5, 0, [], [], [verdict], 5, [], [8], True)
    assert merge({0: ahead, 1: rounds(3, following=4)}, NEW, bytes_max=2000).fresh is (votes == 50)
