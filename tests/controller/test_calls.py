"""Calls that can never work: refused with the field, the value and the fix, and nothing has changed."""

import pytest

from kvcoord.domain import Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Advance,
    Allocate,
    Allocated,
    Call,
    Evict,
    Failed,
    Free,
    LoadBack,
    Match,
    Release,
    Status,
    WriteThrough,
    join_keys,
)
from tests.controller.cluster import Cluster

KEYS = join_keys(block_page_keys([1, 2]))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (Match(b""), "keys"),
        (Match(b"short"), "keys"),
        (Match(bytes(16 * 9)), "keys"),
        (Acquire(bytes(17)), "keys"),
        (Release(99), "lease"),
        (WriteThrough(lease=99), "lease"),
        (WriteThrough(keys=KEYS, slots=[[0, 1, 2]]), "slots"),
        (WriteThrough(keys=KEYS, slots=[[0], [0]]), "slots"),
        (WriteThrough(keys=KEYS, slots=[[4, 5]]), "slots of device.kv"),
        (Free([[0]]), "slots of device.kv"),
        (Free([[-1]]), "slots of device.kv"),
        (Free([[10**9]]), "slots of device.kv"),
        (Free([]), "slots"),
        (LoadBack(KEYS, [[7, 7]]), "slots of device.kv"),
        (Allocate(-1), "count"),
        (Evict(Tier.HOST, -1), "count"),
        (Status(), "call"),
        (Advance(5), "step"),
    ],
)
def test_a_call_that_cannot_work_is_refused_and_the_next_one_is_served(call: Call, field: str) -> None:
    cluster = Cluster(2, 8, 8, limits={"pages_per_operation_max": 8})
    cluster.advance()
    for (answer,) in cluster.ask(call):
        assert isinstance(answer, Failed)
        assert answer.error == "UsageError"
        assert answer.fields[0] == field
    cluster.advance()
    assert all(isinstance(answer[0], Acquired) and answer[0].outcome for answer in cluster.ask(Acquire(KEYS)))
    cluster.settle()


def test_slots_are_freed_or_written_once() -> None:
    cluster = Cluster(1, 8, 8)
    cluster.advance()
    own = cluster.ask(Allocate(2))[0][0]
    assert isinstance(own, Allocated)
    cluster.ask(WriteThrough(keys=KEYS, slots=own.slots, deferred=True))
    for call in (Free(own.slots), WriteThrough(keys=KEYS, slots=own.slots)):
        assert isinstance(cluster.ask(call)[0][0], Failed)
    cluster.settle()
    cluster.check()


def test_a_lease_is_written_once_and_before_its_release() -> None:
    cluster = Cluster(1, 8, 8)
    cluster.advance()
    lease = cluster.ask(Acquire(KEYS))[0][0]
    assert isinstance(lease, Acquired)
    cluster.ask(WriteThrough(lease=lease.lease, deferred=True))
    assert isinstance(cluster.ask(WriteThrough(lease=lease.lease, deferred=True))[0][0], Failed)
    cluster.ask(Release(lease.lease))
    assert isinstance(cluster.ask(WriteThrough(lease=lease.lease))[0][0], Failed)
    cluster.settle()
    cluster.check()


def test_more_calls_than_may_wait_are_refused() -> None:
    cluster = Cluster(2, 8, 8, limits={"calls_waiting_max": 3})
    cluster.advance()
    numbers = [cluster.begin(0, Advance(step)) for step in range(1, 8)]
    refused = [number for number in numbers if isinstance(cluster.answers[0].get(number), Failed)]
    assert refused == numbers[-3:]
