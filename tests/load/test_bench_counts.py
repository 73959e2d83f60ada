"""Kept fast by what can be counted on any machine: messages, encodings, allocations, events. Timings are in `bench`."""

import sys
from collections import Counter

import msgspec
import pytest

from kvcoord.domain import PageKey
from kvcoord.index.keys import block_page_keys
from kvcoord.load.bench.subjects import CoveredSubject
from kvcoord.load.bench.tally import TallyPlan, tally
from kvcoord.protocol.codec import encode
from kvcoord.protocol.ledger import Ledger
from kvcoord.protocol.messages import Decision, Frame, Numbered, Verdict
from tests.controller.cluster import Cluster

JOIN_MESSAGES = 3
"""To each rank while its group joins: a Waiting (the last one gets none), a Prepare and an Activate."""


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the coordinator has encoded a message of each kind."""
    counts: Counter[str] = Counter()

    def counted(message: msgspec.Struct) -> bytes:
        counts[type(message).__name__] += 1
        return encode(message)

    monkeypatch.setattr("kvcoord.runtime.coordinator.encode", counted)
    return counts


@pytest.mark.parametrize("votes", [0, 1, 64])
@pytest.mark.parametrize("ranks", [1, 4])
async def test_a_round_is_one_message_to_each_rank_whatever_it_decides(ranks: int, votes: int) -> None:
    idle = await tally(TallyPlan(ranks=ranks, groups=1, votes=votes, rounds=0))
    busy = await tally(TallyPlan(ranks=ranks, groups=1, votes=votes, rounds=10))
    assert idle.messages_out <= JOIN_MESSAGES * ranks
    assert busy.messages_out - idle.messages_out == 10 * ranks


async def test_copies_that_never_end_cost_a_round_no_message() -> None:
    plan = TallyPlan(ranks=4, groups=1, votes=1, rounds=10)
    alone = await tally(plan)
    crowded = await tally(msgspec.structs.replace(plan, copies_open=100))
    assert crowded.messages_out - alone.messages_out == 4


@pytest.mark.parametrize("ranks", [1, 4, 16])
async def test_a_verdict_is_encoded_once_for_all_ranks(ranks: int, encoded: Counter[str]) -> None:
    await tally(TallyPlan(ranks=ranks, groups=2, votes=3, rounds=10))
    assert encoded[Verdict.__name__] == 2 * 10


def test_a_covered_operation_keeps_no_memory() -> None:
    ledger = Ledger(2)
    ledger.begin([4096, 4096])

    def cover(times: int) -> None:
        for _ in range(times):
            if ledger.available(0) >= 1:
                ledger.issue(0, 1)
                ledger.credit(0, 1)

    cover(10)
    before = sys.getallocatedblocks()
    cover(10_000)
    assert sys.getallocatedblocks() - before < 10


def test_a_covered_operation_is_kept_in_a_log_of_bounded_length() -> None:
    subject = CoveredSubject()
    subject.covered("covered", 10_000)
    before = sys.getallocatedblocks()
    subject.covered("covered", 10_000)
    assert sys.getallocatedblocks() - before < 100


def keys_of(request: int) -> list[PageKey]:
    return block_page_keys(range(request * 3, request * 3 + 3))


class CountingCluster(Cluster):
    """Counts what travels."""

    def __init__(self, ranks: int, device: int, host: int) -> None:
        self.sent: Counter[str] = Counter()
        self.copied = 0
        super().__init__(ranks, device, host)

    def _deliver(self) -> bool:
        self.sent.update(type(message).__name__ for _, message in (*self._up, *self._down))
        return super()._deliver()

    def copy_ended(self, rank: int, error: object = None) -> None:
        self.copied += 1
        super().copy_ended(rank)


def served(ranks: int, requests: int) -> CountingCluster:
    cluster = CountingCluster(ranks, device=256, host=256)
    cluster.sent.clear()
    for request in range(requests):
        cluster.serve(keys_of(request))
    return cluster


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_covered_writes_and_their_acks_need_no_message_of_their_own(ranks: int) -> None:
    cluster = served(ranks, requests=8)
    assert cluster.sent[Frame.__name__] == cluster.step * ranks
    assert set(cluster.sent) <= {Frame.__name__, Verdict.__name__}
    assert cluster.sent[Decision.__name__] == cluster.sent[Numbered.__name__] == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_write_is_one_copy_on_each_rank_however_many_pages_it_has(ranks: int) -> None:
    assert served(ranks, requests=8).copied == 8 * ranks
