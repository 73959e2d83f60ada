"""SGLang's own cache, controller and pools on a CPU, built as its scheduler builds them.

Replaced, because a CPU has no such thing, and nothing of the cache's logic: the copy kernel by an index copy of torch,
registered host memory by plain memory, and imports of packages for GPUs by stand-ins (`stubs`).
"""

import os
import types
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.sglang import stubs

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    stubs.install()
    import sglang.srt.mem_cache.pool_host.common as host_common
    import sglang.srt.mem_cache.pool_host.mha as host_mha
    import torch
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import (
        EvictParams,
        InitLoadBackParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from kvcoord.integrations.sglang import plugin
    from kvcoord.integrations.sglang.cache import KvcoordRadixCache
    from kvcoord.integrations.sglang.capacity import KV

LAYERS: Final = 4
HEADS: Final = 2
HEAD_DIM: Final = 8

KVCOORD: Final = plugin.BACKEND
STOCK: Final = None

plugin.register()


def _copy_rows(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def _plain_memory(dims: Any, dtype: Any = None, **_: object) -> Any:
    return torch.zeros(dims, dtype=dtype)


host_mha.transfer_kv_direct = _copy_rows
host_common.ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory


class Groups:
    """The process groups of one rank, and where it stands in them."""

    def __init__(self, rank: int = 0, tp: int = 1, pp: int = 1) -> None:
        self.rank, self.tp, self.pp = rank, tp, pp
        self.tp_rank, self.pp_rank = rank % tp, rank // tp
        self.tp_group: Any = None
        self.pp_group: Any = None

    def open(self) -> None:
        """Makes the groups; every rank calls it. torch.distributed is initialised."""
        dist = torch.distributed
        for stage in range(self.pp):
            group = dist.new_group([stage * self.tp + rank for rank in range(self.tp)], backend="gloo")
            if stage == self.pp_rank:
                self.tp_group = group
        for column in range(self.tp):
            group = dist.new_group([stage * self.tp + column for stage in range(self.pp)], backend="gloo")
            if column == self.tp_rank:
                self.pp_group = group


@dataclass(frozen=True)
class Options:
    """How one rank's engine is set up. Sizes are in slots of one token."""

    backend: str | None = KVCOORD
    device_slots: int = 256
    host_slots: int = 512
    page_size: int = 1
    write_policy: str = "write_through"
    tree_core: str | None = None
    storage: str | None = None
    storage_options: str | None = None
    file_storage_path: str | None = None
    prefetch_policy: str = "best_effort"
    host_layout: str = "layer_first"
    attention_groups: tuple[Any, Any] = (None, None)
    kv_events: bool = False
    """Tell what is stored where, as routers ask for it."""
    data_parallel: int = 1
    """Attention groups that each serve requests of their own."""


def _arguments(options: Options, groups: Groups) -> Any:
    """SGLang's command line, as it would be for this engine."""
    return ServerArgs(
        model_path="dummy",
        device="cpu",
        page_size=options.page_size,
        tp_size=groups.tp,
        pp_size=groups.pp,
        enable_hierarchical_cache=True,
        hicache_ratio=(options.host_slots - options.page_size) / options.device_slots,
        hicache_size=0,
        hicache_write_policy=options.write_policy,
        hicache_io_backend="direct",
        hicache_mem_layout=options.host_layout,
        hicache_storage_backend=options.storage,
        hicache_storage_backend_extra_config=options.storage_options,
        file_storage_path=options.file_storage_path,
        hicache_storage_prefetch_policy=options.prefetch_policy,
        radix_cache_backend=options.backend,
        dp_size=options.data_parallel,
        enable_dp_attention=options.data_parallel > 1,
    )


@dataclass(frozen=True)
class Layer:
    """The device rows of one layer of one pool. A row holds `sign * (token + shift)`, so it tells whose it is."""

    rows: Any
    sign: int
    shift: int

    def stamp(self, slots: Any, tokens: Sequence[int]) -> None:
        self.rows[slots] = self._values(tokens).expand(-1, *self.rows.shape[1:])

    def holds(self, slots: Any, tokens: Sequence[int]) -> bool:
        return bool((self.rows[slots] == self._values(tokens)).all())

    def _values(self, tokens: Sequence[int]) -> Any:
        return self.sign * (torch.tensor(list(tokens), dtype=torch.float32)[:, None, None] + self.shift)


class Engine:
    """One rank's cache, allocator and device pool, and what a scheduler does with them.

    This one is of a model with full attention only; `hybrid` has the others.
    """

    def __init__(self, groups: Groups | None = None, **options: Any) -> None:
        self.options = Options(**options)
        self.page_size = self.options.page_size
        groups = groups or Groups()
        arguments = _arguments(self.options, groups)
        arguments._mamba_cache_chunk_size = self.page_size  # read from the model's files otherwise
        publish(arguments, role="test", ranks=SpawnRanks(world_rank=groups.rank))
        self.requests = self._request_pool()
        self.kv = self._device_pool()
        self.allocator = self._allocator()
        self.context = self._context(arguments, groups)
        self.cache: Any = create_tree_cache(self.context)
        self.cache.load_back_threshold = 0
        self.unpin_host()

    def unpin_host(self) -> None:
        """A CPU has no pinned memory."""
        for entry in self.cache.cache_controller.mem_pool_host.entries:
            entry.host_pool.pin_memory = False

    # --- what one kind of model differs in ------------------------------------------------------------------------

    is_hybrid_swa = False
    is_hybrid_ssm = False

    def _device_pool(self) -> Any:
        return MHATokenToKVPool(
            size=self.options.device_slots,
            page_size=self.options.page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )

    def _request_pool(self) -> Any:
        return ReqToTokenPool(size=16, max_context_len=4096, device="cpu", enable_memory_saver=False)

    def _allocator(self) -> Any:
        shared: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kvcache": self.kv, "need_sort": False}
        if self.page_size == 1:
            return TokenToKVPoolAllocator(size=self.options.device_slots, **shared)
        return PagedTokenToKVPoolAllocator(size=self.options.device_slots, page_size=self.page_size, **shared)

    def _window(self) -> int | None:
        """Tokens of the sliding window; None without one."""
        return None

    # --------------------------------------------------------------------------------------------------------------

    def _context(self, arguments: Any, groups: Groups) -> Any:
        """What SGLang's scheduler builds a cache from."""
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            tp_cache_group=groups.tp_group,
            attn_tp_cache_group=self.options.attention_groups[0],
            attn_cp_cache_group=self.options.attention_groups[1],
            pp_cache_group=groups.pp_group if groups.pp > 1 else None,
            pp_rank=groups.pp_rank,
            pp_size=groups.pp,
            eviction_policy="lru",
            enable_kv_cache_events=self.options.kv_events,
            tree_core_backend=self.options.tree_core,
            sliding_window_size=self._window(),
        )
        return TreeCacheBuildContext(
            server_args=arguments,
            params=parameters,
            is_hybrid_swa=self.is_hybrid_swa,
            is_hybrid_ssm=self.is_hybrid_ssm,
            enable_hierarchical_cache=True,
            disable_radix_cache=False,
            tp_worker=types.SimpleNamespace(register_hicache_layer_transfer_counter=lambda counter: None),
            model_config=None,
            tp_size=groups.tp,
            tp_rank=groups.tp_rank,
            tp_group=groups.tp_group,
        )

    @property
    def host(self) -> Any:
        return self.cache.cache_controller.mem_pool_host

    @property
    def controller(self) -> Any:
        return self.cache.cache_controller

    def device_free(self) -> int:
        """Free device slots of this rank, whatever the group has agreed on."""
        return int(type(self.allocator).available_size(self.allocator))

    def device_allocators(self) -> dict[str, Any]:
        """What hands out this rank's device slots, by pool."""
        return {KV: self.allocator}

    def take_device(self, pool: str, slots: int) -> Any:
        """Slots for something that is none of the cache's business. None: this rank has not so many."""
        return self.device_allocators()[pool].alloc(slots)

    def host_pools(self) -> dict[str, Any]:
        """The host pools with slots of their own."""
        return {pool: self.host.get_pool(PoolName(pool)) for pool in self.device_allocators()}

    def noise(self, pool: str, slots: int) -> int:
        """How many slots of a pool correspond to so many tokens."""
        return slots

    def sizes(self) -> tuple[int, ...]:
        """Device slots in the tree, evictable and locked."""
        return self.cache.evictable_size(), self.cache.protected_size()

    def locked(self) -> int:
        return int(self.cache.protected_size())

    # --- what a scheduler does ------------------------------------------------------------------------------------

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.cache.check_hicache_events()

    def match(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=key(tokens)))

    def allocate(self, count: int) -> Any:
        """Device slots, as SGLang's scheduler takes them: evict what is short, then allocate. None: not enough."""
        short = count - self.allocator.available_size()
        if short > 0:
            self.allocator.evict_to_free_tokens(self.cache, count)
            if self.allocator.available_size() < count:
                return None
        return self.allocator.alloc(count)

    def insert(self, tokens: Sequence[int], start: int = 0) -> Any:
        """Computes the KV of `tokens[start:]` and inserts the sequence. None: no room on the device."""
        slots = self.allocate(len(tokens) - start)
        if slots is None:
            return None
        self.stamp(slots, tokens[start:])
        prefix = self.match(tokens)
        return self.put(tokens, prefix.last_device_node, start, slots)

    def put(self, tokens: Sequence[int], node: int, start: int, slots: Any) -> Any:
        """Inserts a sequence of which this node's path holds the first `start` tokens, and these slots the rest."""
        path = self.cache.path_device_indices(node)[:start]
        value = torch.cat([path.to(torch.int64), slots.to(torch.int64)])
        return self.cache.insert(self._insertion(InsertParams(key=key(tokens), value=value, prev_prefix_len=start)))

    def _insertion(self, parameters: Any) -> Any:
        """What the model says besides about a sequence that is inserted."""
        return parameters

    def load_back(self, match: Any) -> tuple[int, int]:
        """Loads what a match has on the host. Returns loaded tokens and the last node on the device."""
        request = self._loading_request(match)
        loaded = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
            )
        )
        self.cache.ready_to_load_host_cache()
        return loaded  # type: ignore[no-any-return]

    def _loading_request(self, match: Any) -> Any:
        """What SGLang reads of a request that loads."""
        return types.SimpleNamespace(
            rid="request",
            last_node=match.last_device_node,
            swa_host_hit_length=match.swa_host_hit_length,
            mamba_host_hit_length=match.mamba_host_hit_length,
            kv=types.SimpleNamespace(mamba_pool_idx=None, holds_mamba=False),
        )

    def evict(self, count: int) -> int:
        return int(self.cache.evict(EvictParams(num_tokens=count)).num_tokens_evicted)

    # --- bytes ----------------------------------------------------------------------------------------------------

    def layers(self) -> Iterator[Layer]:
        """Everything that one token's slot addresses on the device."""
        for layer in range(LAYERS):
            yield Layer(self.kv.k_buffer[layer], 1, layer)
            yield Layer(self.kv.v_buffer[layer], -1, layer)

    def stamp(self, slots: Any, tokens: Sequence[int]) -> None:
        for layer in self.layers():
            layer.stamp(slots, tokens)

    def holds(self, node: int, tokens: Sequence[int]) -> bool:
        """Do the device rows on the path to this node hold the KV of these tokens, on all layers?"""
        slots = self.cache.path_device_indices(node)
        return all(layer.holds(slots, tokens[: len(slots)]) for layer in self.layers())

    def wipe(self) -> None:
        """Overwrites every device row."""
        for layer in self.layers():
            layer.rows.fill_(-1e9)

    def close(self) -> None:
        self.cache.shutdown()


def key(tokens: Sequence[int]) -> Any:
    return RadixKey(array("q", tokens))


def is_agreed(engine: Engine) -> bool:
    return isinstance(engine.cache, KvcoordRadixCache)
