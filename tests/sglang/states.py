"""Engines of models with recurrent layers: a state beside the KV, one slot for a node's end."""

import types
from collections.abc import Iterator, Sequence
from typing import Any, Final

import sglang.srt.mem_cache.pool_host.mamba as host_mamba
import sglang.srt.mem_cache.pool_host.mha as host_mha
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from kvcoord.integrations.sglang.capacity import KV
from kvcoord.integrations.sglang.components import STATE
from tests.sglang.engine import HEAD_DIM, HEADS, LAYERS, Engine, Groups, Layer

STATE_TOKENS: Final = 20
"""There is one state for so many tokens' slots."""

_RECURRENT: Final = list(range(1, LAYERS, 2))
_ATTENTION: Final = list(range(0, LAYERS, 2))


def _all_layers_to_pages(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Layer by layer on the device, page by page on the host."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for at, source in enumerate(src_ptrs):
        destination, layer = dst_ptrs[at // layers], at % layers
        destination[dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]


def _pages_to_one_layer(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        destination[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


for module in (host_mha, host_mamba):
    module.transfer_kv_all_layer_direct_lf_pf = _all_layers_to_pages
    module.transfer_kv_per_layer_direct_pf_lf = _pages_to_one_layer


class StateEngine(Engine):
    """A model in which every second layer is recurrent. Pages of one token.

    A sequence's state holds a number made of its tokens in every element, so it tells whose it is.
    """

    is_hybrid_ssm = True

    def __init__(self, groups: Groups | None = None, **options: Any) -> None:
        self._of_requests: list[tuple[int, Any]] = []
        """States that requests hold while their load is not over everywhere: the loaded node, and the request."""
        super().__init__(groups, host_layout="page_first_direct", **options)

    def _request_pool(self) -> Any:
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=16, n_groups=1, num_heads=2, head_dim=4, state_size=4, conv_kernel=4
        )
        return HybridReqToTokenPool(
            size=16,
            mamba_size=self.options.device_slots // STATE_TOKENS,
            mamba_spec_state_size=0,
            max_context_len=4096,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=_RECURRENT),
            mamba_layer_ids=_RECURRENT,
            enable_mamba_extra_buffer=False,
        )

    def _device_pool(self) -> Any:
        return HybridLinearKVPool(
            size=self.options.device_slots,
            dtype=torch.float32,
            page_size=self.page_size,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            full_attention_layer_ids=_ATTENTION,
            device="cpu",
            mamba_pool=self.requests.mamba_pool,
        )

    def device_allocators(self) -> dict[str, Any]:
        return {KV: self.allocator, STATE: self.requests.mamba_allocator}

    def take_device(self, pool: str, slots: int) -> Any:
        """A state is taken past what the group has agreed on."""
        if pool == STATE:
            return MambaSlotAllocator._do_alloc(self.requests.mamba_allocator, slots)
        return super().take_device(pool, slots)

    def noise(self, pool: str, slots: int) -> int:
        return slots // STATE_TOKENS if pool == STATE else slots

    def sizes(self) -> tuple[int, ...]:
        return (*super().sizes(), self.cache.mamba_evictable_size(), self.cache.mamba_protected_size())

    def locked(self) -> int:
        return super().locked() + int(self.cache.mamba_protected_size())

    # --- what a scheduler does ------------------------------------------------------------------------------------

    def put(self, tokens: Sequence[int], node: int, start: int, slots: Any) -> Any:
        self._state = self.allocate_state()
        if self._state is None:
            self.allocator.free(slots)
            return None
        self.stamp_state(self._state, tokens)
        result = super().put(tokens, node, start, slots)
        if result.mamba_exist:
            self.requests.mamba_allocator.free(self._state)
        return result

    def allocate_state(self) -> Any:
        """A request's state, as SGLang's scheduler takes it: evict if there is none, then allocate. None: no room."""
        self._end_loads()
        states = self.requests.mamba_allocator
        if states.schedulable_available_size() < 1:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        return states.alloc(1)

    def _insertion(self, parameters: Any) -> Any:
        parameters.mamba_value = self._state
        return parameters

    def load_back(self, match: Any) -> tuple[int, int]:
        self._end_loads()
        loaded = super().load_back(match)
        request = self._request
        if request.kv.mamba_pool_idx is not None:
            self._of_requests.append((match.best_match_node, request))
        return loaded

    def _loading_request(self, match: Any) -> Any:
        self._request = super()._loading_request(match)
        self._request.kv = _RequestKv()
        return self._request

    def evict(self, count: int) -> int:
        self._end_loads()
        return super().evict(count)

    def _end_loads(self) -> None:
        """Requests whose loads are over on all ranks end, and give their states back."""
        loading = [(node, request) for node, request in self._of_requests if node in self.cache.ongoing_load_back]
        for node, request in self._of_requests:
            if node not in self.cache.ongoing_load_back:
                self.requests.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(0))
        self._of_requests = loading

    # --- bytes ----------------------------------------------------------------------------------------------------

    def layers(self) -> Iterator[Layer]:
        pool = self.kv.full_kv_pool
        for layer, (keys, vals) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True)):
            yield Layer(keys, 1, layer)
            yield Layer(vals, -1, layer)

    def _state_layers(self) -> list[Any]:
        states = self.requests.mamba_pool.mamba_cache
        return [rows for part in (*states.conv, states.temporal) for rows in part]

    def stamp_state(self, slot: Any, tokens: Sequence[int]) -> None:
        for layer, rows in enumerate(self._state_layers()):
            rows[slot] = _state_of(tokens) + layer

    def holds_state(self, slot: Any, tokens: Sequence[int]) -> bool:
        return all(
            bool((rows[slot] == _state_of(tokens) + layer).all()) for layer, rows in enumerate(self._state_layers())
        )

    def holds(self, node: int, tokens: Sequence[int]) -> bool:
        length = len(self.cache.path_device_indices(node))
        state = self.cache.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        right = not length or (state is not None and self.holds_state(state, tokens[:length]))
        return right and super().holds(node, tokens)

    def wipe(self) -> None:
        super().wipe()
        for rows in self._state_layers():
            rows.fill_(-100.0)


class _RequestKv(types.SimpleNamespace):
    """A request's part in SGLang's pools."""

    mamba_pool_idx: Any = None

    @property
    def holds_mamba(self) -> bool:
        return self.mamba_pool_idx is not None


def _state_of(tokens: Sequence[int]) -> int:
    """Small enough to be exact in every dtype that a state may have."""
    return sum((at + 1) * token for at, token in enumerate(tokens)) % 101
