"""The pools of one cache: which of them have slots of their own, what a write takes of each, and taking it.

SGLang's tree keeps the KV of full attention, and for some models one more thing beside it: the KV of a sliding window,
a slot for each token of the window's tail, or a recurrent state, one slot for a node's end. Each has its own slots on
the device and on the host. Pools that follow the KV's slots (an indexer's keys, a draft model's KV) need nothing here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from kvcoord.integrations.sglang.capacity import KV, Needs
from kvcoord.integrations.sglang.counting import free_count

COMPONENTS: Final = {
    PoolName.KV.value: ComponentType.FULL,
    PoolName.SWA.value: ComponentType.SWA,
    PoolName.MAMBA.value: ComponentType.MAMBA,
}
"""What is supported: the pool of each part of SGLang's tree."""

WINDOW: Final = PoolName.SWA.value
STATE: Final = PoolName.MAMBA.value

Cache = Any
"""A KvcoordRadixCache. Not imported: it imports this module."""

_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

Reserved = dict[str, Any]
"""Host slots by pool."""


class Pools:
    """The pools of one cache that have slots of their own. `names` begins with the KV's."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._host = cache.cache_controller.mem_pool_host
        self.names = [pool for pool, component in COMPONENTS.items() if component in cache.tree_components]
        self.is_hybrid = len(self.names) > 1
        self._is_write_back = cache.is_write_back
        self._sizes: list[int] = []
        self._digest = 0
        """Of these sizes of the tree."""

    def device_free(self) -> dict[str, Callable[[], int]]:
        """This rank's own counts. Taken before `allocations` shows SGLang the agreed ones."""
        allocator = self._cache.token_to_kv_pool_allocator
        if WINDOW in self.names:
            counts = {KV: free_count(allocator.full_attn_allocator), WINDOW: free_count(allocator.swa_attn_allocator)}
        else:
            counts = {KV: free_count(allocator)}
        if STATE in self.names:
            counts[STATE] = free_count(self._cache.req_to_token_pool.mamba_allocator)
        return counts

    def host_free(self) -> dict[str, Callable[[], int]]:
        return {pool: free_count(self._host.get_pool(PoolName(pool))) for pool in self.names}

    # --- writes ---------------------------------------------------------------------------------------------------

    def is_missing(self, node: int) -> bool:
        """Is anything of this node, or of the window that ends with it, not on the host?"""
        if not self._cache.is_backuped(node):
            return True
        return self.is_hybrid and bool(self._cache.tree_core.build_backup_spec(node)[1])

    def needs(self, nodes: Sequence[int]) -> Needs:
        """Host slots for what is missing of these nodes, which are on one path. Windows that overlap count once."""
        core = self._cache.tree_core
        needs = dict.fromkeys(self.names, 0)
        windows: set[int] = set()
        for node in nodes:
            device_slots, by_component = core.build_backup_spec(node)
            needs[KV] += len(device_slots)
            for transfer in (transfer for transfers in by_component.values() for transfer in transfers):
                pool = transfer.name.value
                if pool == WINDOW:
                    windows.update(transfer.nodes_to_load)
                else:
                    needs[pool] += len(transfer.device_indices)
        if windows:
            (path,) = core.collect_path_info(nodes[-1:])
            needs[WINDOW] = sum(info.path_end - info.path_start for info in path if info.node_id in windows)
        return {pool: slots for pool, slots in needs.items() if slots}

    def reserve(self, needs: Needs) -> Reserved | None:
        """Host slots in every pool, or in none. Nothing is evicted."""
        reserved: Reserved = {}
        for pool, slots in needs.items():
            taken = self._host.alloc(slots, pool=PoolName(pool))
            if taken is None:
                self.release(reserved)
                return None
            reserved[pool] = taken
        return reserved

    def release(self, reserved: Reserved) -> None:
        for pool, slots in reserved.items():
            self._host.free(slots, pool=PoolName(pool))

    # --- eviction and comparison ----------------------------------------------------------------------------------

    def freed(self, result: Any) -> Needs:
        """Host slots by pool that a step of SGLang's eviction gives back."""
        freed = {pool: result.host_frees.get(COMPONENTS[pool], ()) for pool in self.names}
        return {pool: sum(map(len, slots)) for pool, slots in freed.items() if slots}

    def tree_digest(self) -> int:
        """What is cheap to read of the tree and differs soon after two trees have parted.

        Only with write-back does an eviction take host slots of nodes that stay; SGLang's number says of which.
        """
        core = self._cache.tree_core
        sizes = [core.evictable_size(), core.protected_size()]
        if self._is_write_back:
            sizes.append(core.write_back_duplicate_reclaim_digest)
        if self.is_hybrid:
            sizes += self._side_sizes()
        if sizes != self._sizes:
            self._sizes, self._digest = sizes, _mixed(sizes)
        return self._digest

    def _side_sizes(self) -> list[int]:
        """Evictable and locked device slots of each part of the tree beside the KV."""
        core = self._cache.tree_core
        parts = [COMPONENTS[pool] for pool in self.names[1:]]
        return [
            count(part) for part in parts for count in (core.component_evictable_size, core.component_protected_size)
        ]


def _mixed(sizes: Sequence[int]) -> int:
    digest = 0
    for size in sizes:
        digest = ((digest ^ size) * _MIX) & _MASK
    return digest
