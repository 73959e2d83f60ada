"""Operations put to the vote of a later round: whose outcome it is, whenever it comes."""

import pytest

from kvcoord.client import reading
from kvcoord.client.progress import PendingOutcome
from kvcoord.domain import Committed, Path
from kvcoord.errors import (
    Diverged,
    GroupLost,
    KvcoordError,
    UsageError,
)
from kvcoord.protocol.local import (
    Advance,
    Advanced,
    Agreed,
    Failed,
    Outcome,
    Release,
    Written,
)
from tests.client.rig import Rig
from tests.client.values import aborted, committed


def advanced(*outcomes: Outcome) -> Advanced:
    return Advanced(1, 0, list(outcomes), [], [], 0)


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


def test_a_committed_outcome_is_true_and_a_pending_one_is_not() -> None:
    assert PendingOutcome("op/1", Committed("op/1", Path.VOTED))
    assert not PendingOutcome("op/1", aborted("op/1"))
    assert not PendingOutcome("op/1")
