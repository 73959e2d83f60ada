"""The parts of the SGLang integration that know nothing of SGLang, one by one."""

import subprocess
import sys
from collections.abc import Sequence
from http import HTTPStatus
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from kvcoord.domain import Outcome, Path, Reason
from kvcoord.integrations.sglang.capacity import KV, Capacity
from kvcoord.integrations.sglang.copies import Copies
from kvcoord.integrations.sglang.counters import WAITED_S, Counters
from kvcoord.integrations.sglang.metrics import RankMetrics
from kvcoord.integrations.sglang.rounds import Rounds
from kvcoord.integrations.sglang.storage import ReadyQueue
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.messages import Ack, Decision, Verdict, Vote


class FakeMember:
    """Takes frames, and gives the verdicts that were put into it."""

    state = "active"

    def __init__(self) -> None:
        self.frames: list[tuple[int, list[int], int, list[Vote], list[Ack]]] = []
        self.verdicts: dict[int, Verdict] = {}
        self.waited: list[int] = []

    def open(self, free: Sequence[int]) -> Sequence[int]:
        return free

    def close(self) -> None:
        """Nothing to end."""

    def send(self, step: int, free: list[int], digest: int, votes: list[Vote], acks: list[Ack]) -> None:
        self.frames.append((step, free, digest, votes, acks))

    def take(self, round_number: int) -> Verdict:
        self.waited.append(round_number)
        return self.verdicts.pop(round_number)

    def decide(self, vote: Vote) -> Decision:
        return Decision(vote.operation, Outcome.COMMIT if vote.yes else Outcome.ABORT, reason=vote.reason)


def verdict(number: int, capacity: list[int], absent: list[int] | None = None) -> Verdict:
    return Verdict(1, number, [], [], capacity, absent or [])


def make_rounds(lag: int = 1) -> tuple[Rounds, FakeMember]:
    member = FakeMember()
    return Rounds(member, Digest(16), lag), member


def running(*nodes: int, over: bool) -> Any:
    return SimpleNamespace(node_ids=list(nodes), finish_event=SimpleNamespace(query=lambda: over))


def acked(member: FakeMember, rounds: Rounds) -> list[str]:
    """What the next frame acks."""
    rounds.send([], 0)
    return [ack.operation for ack in member.frames[-1][4]]


class Pools:
    """This rank's free counts."""

    def __init__(self, device: int, host: int) -> None:
        self.device, self.host = device, host

    def capacity(self, agreed: list[int]) -> Capacity:
        capacity = Capacity({KV: lambda: self.device}, {KV: lambda: self.host})
        capacity.begin(capacity.now(), agreed)
        return capacity


def test_importing_the_package_imports_neither_sglang_nor_torch() -> None:
    code = "import sys, kvcoord.integrations.sglang; sys.exit(bool({'sglang', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_first_lag_steps_have_no_verdict_to_apply() -> None:
    rounds, member = make_rounds(lag=2)
    for _ in range(2):
        assert rounds.verdict() is None
        rounds.send([], 0)
    member.verdicts[0] = verdict(0, [])
    assert rounds.verdict() is not None


def test_a_verdict_that_has_come_is_applied_and_only_a_late_one_is_waited_for() -> None:
    rounds, member = make_rounds()
    rounds.send([], 0)
    member.verdicts[0] = verdict(0, [])
    first = rounds.verdict()
    assert (first, member.waited) == (verdict(0, []), [])
    rounds.send([], 0)
    with pytest.raises(KeyError):
        rounds.verdict()
    assert member.waited == [1]


def test_what_was_said_travels_in_one_frame_and_only_once() -> None:
    rounds, member = make_rounds()
    rounds.ack("a")
    rounds.ack("b")
    assert acked(member, rounds) == ["a", "b"]
    assert acked(member, rounds) == []


def test_ids_of_another_life_are_never_used_again() -> None:
    rounds, _ = make_rounds()
    before = rounds.name("load-back")
    rounds.begin_life()
    assert rounds.name("load-back") != before


def test_the_group_has_as_many_device_slots_as_its_poorest_rank() -> None:
    pools = Pools(device=100, host=50)
    capacity = pools.capacity([80, 50])
    assert capacity.device_available() == 80
    pools.device -= 30
    assert capacity.device_available() == 50


def test_a_verdict_moves_the_surplus_to_what_was_counted_at_its_frame() -> None:
    pools = Pools(device=100, host=50)
    capacity = pools.capacity([80, 50])
    capacity.count(0)
    pools.device -= 10
    capacity.settle(verdict(0, [95, 50]))
    assert capacity.device_available() == 85


def test_a_round_without_a_rank_changes_no_capacity() -> None:
    pools = Pools(device=100, host=50)
    capacity = pools.capacity([80, 40])
    capacity.count(0)
    capacity.settle(verdict(0, [0, 0], absent=[1]))
    assert (capacity.device_available(), capacity.host_available()) == (80, 40)


def test_host_slots_that_were_taken_are_not_given_again_by_an_older_count() -> None:
    capacity = Pools(device=0, host=50).capacity([0, 40])
    capacity.count(0)
    capacity.take_host({KV: 30})
    capacity.settle(verdict(0, [0, 40]))
    assert capacity.host_available() == 10


def test_a_copy_is_acked_once_and_only_when_all_its_nodes_are_over() -> None:
    rounds, member = make_rounds()
    copies = Copies(rounds)
    copies.begin("w", [1, 2])
    first, second = running(1, over=True), running(2, over=False)
    copies.report([first, second])
    assert acked(member, rounds) == []
    second.finish_event = SimpleNamespace(query=lambda: True)
    copies.report([first, second])
    copies.report([first, second])
    assert acked(member, rounds) == ["w"]


def test_a_copy_leaves_the_list_with_the_groups_word_and_not_before() -> None:
    rounds, _ = make_rounds()
    copies = Copies(rounds)
    copies.begin("w", [1])
    entries = [running(1, over=True)]
    copies.report(entries)
    assert copies.finished(entries) == 0
    assert copies.completed("w")
    assert copies.finished(entries) == 1
    assert not copies.completed("w")


def test_merged_copies_leave_together_when_the_last_of_their_operations_is_over() -> None:
    rounds, _ = make_rounds()
    copies = Copies(rounds)
    copies.begin("v", [1])
    copies.begin("w", [2])
    entries = [running(1, 2, over=True)]
    copies.report(entries)
    copies.completed("v")
    assert copies.finished(entries) == 0
    copies.completed("w")
    assert copies.finished(entries) == 1


def test_a_reset_acks_what_is_open_so_that_nobody_waits_for_it() -> None:
    rounds, member = make_rounds()
    copies = Copies(rounds)
    copies.begin("w", [1])
    copies.reset()
    assert acked(member, rounds) == ["w"]
    assert len(copies) == 0


def ready(rounds: Rounds, *entries: int) -> tuple[ReadyQueue, "Queue[int]"]:
    """A queue of storage threads that have put these entries, and its agreement."""
    queue: Queue[int] = Queue()
    for entry in entries:
        queue.put(entry)
    return ReadyQueue("hit", rounds, str), queue


def test_entries_are_taken_off_a_queue_in_order_even_if_a_later_one_is_complete_first() -> None:
    rounds, member = make_rounds()
    agreed, queue = ready(rounds, 7, 8)
    agreed.report(queue)
    assert acked(member, rounds) == ["hit/0/7", "hit/0/8"]
    agreed.completed("hit/0/8")
    assert agreed.take_agreed() == 0
    agreed.completed("hit/0/7")
    assert agreed.take_agreed() == 2


def test_an_entry_is_acked_once_and_one_that_comes_later_on_its_own() -> None:
    rounds, member = make_rounds()
    agreed, queue = ready(rounds, 7)
    agreed.report(queue)
    queue.put(8)
    agreed.report(queue)
    agreed.report(queue)
    assert acked(member, rounds) == ["hit/0/7", "hit/0/8"]


def test_an_entry_that_will_not_come_is_answered_and_never_taken() -> None:
    rounds, member = make_rounds()
    agreed, queue = ready(rounds, 7)
    agreed.report(queue)
    agreed.answer("7")
    agreed.answer("8")
    assert acked(member, rounds) == ["hit/0/7", "hit/0/8"]
    assert not agreed.completed("hit/0/8")
    assert agreed.completed("hit/0/7")
    assert agreed.take_agreed() == 1


def test_what_a_rank_has_decided_and_holds_back_can_be_read_as_metrics() -> None:
    counters, pools = Counters(), Pools(device=100, host=64)
    capacity = pools.capacity([60, 48])
    capacity.take_host({KV: 16})
    counters.covered("load-back")
    counters.covered("retraction", Reason.HOST_FULL)
    counters.decided("write-through", Path.VOTED, Outcome.ABORT, Reason.HOST_FULL)
    counters.waited(WAITED_S / 2)
    counters.waited(0.25)
    metrics = RankMetrics("engine", 3, counters, capacity, lambda: "active", lambda: 2)
    page = metrics.routes()["/metrics"]().body.decode()

    def decided(operation: str, outcome: str, path: str, reason: str) -> str:
        labels = f'group="engine",operation="{operation}",outcome="{outcome}",path="{path}",rank="3",reason="{reason}"'
        return f"kvcoord_sglang_decisions_total{{{labels}}} 1.0"

    scope = 'group="engine"'
    for line in (
        f'kvcoord_sglang_membership_state{{{scope},rank="3",state="active"}} 1.0',
        decided("load-back", "commit", "covered", ""),
        decided("retraction", "abort", "covered", "host_full"),
        decided("write-through", "abort", "voted", "host_full"),
        f'kvcoord_sglang_verdict_waits_total{{{scope},rank="3"}} 1.0',
        f'kvcoord_sglang_verdict_wait_seconds_total{{{scope},rank="3"}} 0.25',
        f'kvcoord_sglang_operations_open{{{scope},rank="3"}} 2.0',
        f'kvcoord_sglang_held_back_slots{{{scope},pool="device.kv",rank="3"}} 40.0',
        f'kvcoord_sglang_held_back_slots{{{scope},pool="host.kv",rank="3"}} 32.0',
    ):
        assert line in page.splitlines()


def test_a_rank_whose_group_does_not_work_is_not_ready() -> None:
    metrics = RankMetrics("engine", 0, Counters(), Pools(1, 1).capacity([1, 1]), lambda: "joining", lambda: 0)
    assert metrics.routes()["/readyz"]().status == HTTPStatus.SERVICE_UNAVAILABLE
