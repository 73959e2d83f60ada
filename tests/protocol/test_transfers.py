from hypothesis import given
from hypothesis import strategies as st

from kvcoord.domain import Reason
from kvcoord.protocol.messages import Ack, Completion
from kvcoord.protocol.transfers import TransferTable

OK = Ack("op", True)
FAILED = Ack("op", False, Reason.COPY_FAILED)


def table() -> TransferTable:
    return TransferTable(0b111, 10.0, 4)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12))
def test_an_operation_ends_once_and_only_when_every_rank_has_acked(acks: list[tuple[int, bool]]) -> None:
    transfers = table()
    transfers.expect("op", 0b111, 0.0)
    told = [transfers.record(rank, OK if ok else FAILED, 0.0) for rank, ok in acks]
    ends = [completion for completion in told if completion is not None]
    first = dict(reversed(acks))
    drained = [completion for completion in ends if completion.drained]
    assert len(drained) == (len(first) == 3)
    assert len(ends) - len(drained) <= 1
    if drained:
        assert drained[0].ok == all(first.values())
        assert ends[-1] is drained[0]
    assert len(transfers) == (0 if drained else 1)


def test_deadlines_are_in_order_also_of_transfers_first_heard_of_in_an_ack() -> None:
    transfers = table()
    transfers.expect("a", 0b111, 0.0)
    transfers.record(0, Ack("b", True), 1.0)
    transfers.expect("c", 0b111, 2.0)
    assert transfers.deadline() == 10.0
    assert [late.operation for late in transfers.expire(11.0)] == ["a", "b"]
    assert transfers.deadline() == 12.0
    assert [late.operation for late in transfers.expire(12.0)] == ["c"]
    assert transfers.deadline() is None
    assert transfers.expire(100.0) == []


def test_a_late_rank_is_named_and_its_end_is_told_when_it_comes() -> None:
    transfers = table()
    transfers.expect("op", 0b111, 0.0)
    transfers.record(0, OK, 1.0)
    assert transfers.expire(10.0) == [Completion("op", False, False, 0, Reason.COPY_TIMEOUT, 1)]
    assert transfers.record(2, OK, 11.0) is None
    assert transfers.record(1, OK, 12.0) == Completion("op", False, True, 0, Reason.COPY_TIMEOUT, 1)


def test_what_was_retracted_in_an_earlier_epoch_is_not_completed_in_this_one() -> None:
    transfers = table()
    transfers.resume([Completion("op", False, False, 4, Reason.COPY_TIMEOUT, 1)])
    assert [transfers.record(rank, OK, 0.0) for rank in (0, 1)] == [None, None]
    assert transfers.deadline() is None
    assert transfers.record(2, OK, 0.0) == Completion("op", False, True, 0, Reason.COPY_TIMEOUT, 1)


def test_an_ack_of_a_rank_that_does_not_take_part_opens_nothing() -> None:
    transfers = table()
    assert transfers.record(0, Ack("op", True, None, 0b110), 0.0) is None
    assert (len(transfers), transfers.ignored) == (0, 1)


def test_a_lost_rank_retracts_what_is_open_and_not_yet_retracted() -> None:
    transfers = table()
    transfers.expect("a", 0b111, 0.0)
    transfers.record(1, Ack("b", False, Reason.COPY_FAILED), 0.0)
    assert transfers.retract_all(2) == [Completion("a", False, False, 0, Reason.RANK_LOST, 2)]


def test_what_is_remembered_of_ended_operations_is_bounded() -> None:
    transfers = TransferTable(0b1, 10.0, 4)
    for number in range(20):
        transfers.record(0, Ack(f"op{number}", True), 0.0)
    assert transfers.record(0, Ack("op19", True), 0.0) is None
    assert transfers.record(0, Ack("op15", True), 0.0) == Completion("op15", True)
