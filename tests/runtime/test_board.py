"""What the board gives to an engine that pops its verdicts itself."""

import time

import pytest

from kvcoord.errors import GroupLost
from kvcoord.protocol.messages import Verdict
from kvcoord.runtime.board import Board


def verdict(number: int) -> Verdict:
    return Verdict(1, number, [], [], [8])


def test_what_was_not_taken_is_void_when_the_membership_ends() -> None:
    board = Board()
    verdicts = board.verdicts
    board.post_verdict(verdict(0))
    board.fail(GroupLost("g", "rank 1 is gone", 1.0))
    assert verdicts == {}
    with pytest.raises(GroupLost):
        board.take_verdict(0, time.monotonic())


def test_what_comes_after_the_end_is_not_kept() -> None:
    board = Board()
    verdicts = board.verdicts
    board.fail(GroupLost("g", "rank 1 is gone", 1.0))
    board.post_verdict(verdict(0))
    assert verdicts == {}
