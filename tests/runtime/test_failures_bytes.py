"""Scenarios from the field that are about bytes, memory, keys and counters, with real processes: D, H, S to U."""

import errno
from pathlib import Path

import pytest

from kvcoord.domain import OperationKind, Outcome, Reason, Tier
from kvcoord.errors import LoadRetracted, PeerUnavailable
from kvcoord.observability.snapshot import WorkerSnapshot
from tests.runtime.engine import KEYS, on_all
from tests.runtime.process_group import ProcessGroup
from tests.runtime.scrape import samples
from tests.runtime.test_failures_worker import engines, nothing_leaks, store_and_read_back


async def test_scenario_d_host_pages_that_a_slow_copy_reads_are_neither_evicted_nor_overwritten(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2).equip(1, copy_faults={"delay_s": 0.5}) as group, engines(group) as made:
        await on_all(*(engine.store(KEYS, b"x") for engine in made))
        await on_all(*(engine.settle() for engine in made))
        await on_all(*(engine.cache.evict(Tier.DEVICE, 4) for engine in made))
        leases = await on_all(*(engine.cache.acquire(KEYS, landed=False) for engine in made))
        assert await on_all(*(engine.cache.evict(Tier.HOST, 64) for engine in made)) == [0, 0]
        for engine, lease in zip(made, leases, strict=True):
            await lease.landed()
            views = [engine.cache.device[0].view(layer, slot) for layer in range(4) for slot in lease.slots[0]]
            assert {bytes(view) for view in views} == {b"x" * 64}
            del views
        await on_all(*(lease.release() for lease in leases))
        await on_all(*(engine.settle() for engine in made))
        await nothing_leaks(group)


async def test_scenario_h_a_load_that_fails_on_one_rank_is_void_where_its_own_copy_has_landed(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2).equip(1, copy_faults={"fail_every": 2}) as group, engines(group) as made:
        await on_all(*(engine.store(KEYS, b"x") for engine in made))
        await on_all(*(engine.settle() for engine in made))
        await on_all(*(engine.cache.evict(Tier.DEVICE, 4) for engine in made))
        leases = await on_all(*(engine.cache.acquire(KEYS) for engine in made))
        assert [bool(lease.error) for lease in leases] == [False, True]
        await leases[0].landed()
        await on_all(*(engine.settle() for engine in made))
        for lease in leases:
            with pytest.raises(LoadRetracted, match="copy_failed on rank 1"):
                await lease.landed()
            await lease.release()
        await on_all(*(engine.settle() for engine in made))
        await nothing_leaks(group)


async def test_scenario_s_a_worker_whose_memory_cannot_be_mapped_refuses_before_it_joins(tmp_path: Path) -> None:
    """With code, size and limit; the other rank waits for it by name, and works with it once it has what it needs."""
    group = ProcessGroup(tmp_path, 2, pools=[{"name": "kv", "page_bytes": 1 << 26, "layers": 4}])
    async with group.children:
        await group.coordinator()
        await group.worker(0, host_pages=4, device_pages=2)
        with pytest.raises(PeerUnavailable) as refused:
            await group.worker(1, host_pages=1 << 20, device_pages=2)
        for told in ("exit code 2", f"Errno {errno.ENOMEM}", f"{1 << 48} bytes", "RLIMIT_AS is", "pools.kv.capacity"):
            assert told in str(refused.value)
        await group.until(0, lambda snapshot: snapshot.ready_reason == "waiting for ranks 1")
        await group.worker(1, host_pages=4, device_pages=2)
        await group.all_active()


async def test_scenario_t_page_keys_do_not_depend_on_the_interpreters_hash_seed(tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path, 2)
    for rank in range(2):
        group.equip(rank, variables={"PYTHONHASHSEED": str(rank + 1)})
    async with group, engines(group) as made:
        await store_and_read_back(made)
        digests = {(await group.status(rank)).index_digest for rank in range(2)}
        assert len(digests) == 1


async def test_scenario_u_hits_and_aborts_are_counted_once_for_the_group_and_alike_on_all_ranks(tmp_path: Path) -> None:
    """Ten loads of four pages and one vote that aborts, as the status and the page for Prometheus have them."""

    def counted(snapshot: WorkerSnapshot) -> object:
        return snapshot.pages_hit, snapshot.pages_requested, snapshot.decisions

    group = ProcessGroup(tmp_path, 2)
    for rank in range(2):
        group.equip(rank, http="127.0.0.1:0")
    async with group, engines(group) as made:
        await store_and_read_back(made)
        for _ in range(9):
            await on_all(*(engine.cache.evict(Tier.DEVICE, 4) for engine in made))
            await on_all(*(engine.read(KEYS) for engine in made))
            await on_all(*(engine.settle() for engine in made))
        await on_all(made[0].cache.agree("own/1", True), made[1].cache.agree("own/1", False))
        first, second = [await group.status(rank) for rank in range(2)]
        shown = [await samples(group.ready[f"r{rank}"].http) for rank in range(2)]
    assert counted(first) == counted(second)
    assert first.pages_hit == {"device": 0, "host": 40}
    loads = [count for count in first.decisions if count.operation is OperationKind.LOAD_BACK]
    assert [(count.outcome, count.count) for count in loads] == [(Outcome.COMMIT, 10)]
    aborts = [count for count in first.decisions if count.outcome is Outcome.ABORT]
    assert [(count.reason, count.count) for count in aborts] == [(Reason.REFUSED, 1)]
    for rank, page in enumerate(shown):
        hits = f'kvcoord_worker_pages_hit_total{{group="default",rank="{rank}",tier="host"}}'
        assert page[hits] == 40.0
        assert min(page.values()) >= 0.0
