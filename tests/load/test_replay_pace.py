"""When an engine of a replay begins its next step."""

import socket

import pytest

from kvcoord.errors import PeerUnavailable
from kvcoord.load.pace import Pace


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def pace(
        self,
        *,
        speed_up: float = 0.0,
        jitter_s: float = 0.0,
        seed: int = 0,
        upstream: socket.socket | None = None,
        downstream: socket.socket | None = None,
    ) -> Pace:
        pace = Pace(
            speed_up=speed_up,
            jitter_s=jitter_s,
            seed=seed,
            upstream=upstream,
            downstream=downstream,
            sleep=self.sleep,
            clock=lambda: self.now,
        )
        pace.start(self.now)
        return pace


def test_a_request_waits_for_its_timestamp_divided_by_the_speed_up() -> None:
    clock = Clock()
    pace = clock.pace(speed_up=10)
    for timestamp_ms in (0, 5_000, 7_000):
        pace.wait_for_request(timestamp_ms)
    assert clock.slept == pytest.approx([0.5, 0.2])


def test_a_late_request_and_one_without_speed_up_do_not_wait() -> None:
    clock = Clock()
    pace = clock.pace(speed_up=1)
    clock.now += 60
    pace.wait_for_request(1_000)
    clock.pace().wait_for_request(1_000_000)
    assert clock.slept == []


def test_jitter_is_bounded_and_the_same_in_every_run() -> None:
    first, second = Clock(), Clock()
    for clock in (first, second):
        pace = clock.pace(jitter_s=0.01, seed=3)
        for _ in range(50):
            pace.begin_step()
    assert first.slept == second.slept
    assert len(set(first.slept)) == 50
    assert all(0 <= seconds < 0.01 for seconds in first.slept)


def test_a_stage_begins_a_step_once_for_each_step_that_the_stage_before_has_ended() -> None:
    sender, receiver = socket.socketpair()
    receiver.setblocking(False)
    before, after = Clock().pace(downstream=sender), Clock().pace(upstream=receiver)
    with pytest.raises(BlockingIOError):
        after.begin_step()
    before.end_step()
    before.end_step()
    after.begin_step()
    after.begin_step()
    with pytest.raises(BlockingIOError):
        after.begin_step()
    before.close()
    after.close()


def test_the_end_of_a_neighbouring_stage_is_an_error_and_no_hang() -> None:
    sender, receiver = socket.socketpair()
    after = Clock().pace(upstream=receiver)
    sender.close()
    with pytest.raises(PeerUnavailable, match="stage before"):
        after.begin_step()
    after.close()
    sender, receiver = socket.socketpair()
    before = Clock().pace(downstream=sender)
    receiver.close()
    with pytest.raises(PeerUnavailable, match="stage after"):
        before.end_step()
    before.close()
