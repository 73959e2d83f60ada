"""Engines of models that keep more than one pool: SGLang's own pools, allocators and host stacks, on a CPU."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_hicache_draft_sidecars
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MiniMaxSparseKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from kvcoord.integrations.sglang.capacity import KV
from kvcoord.integrations.sglang.components import WINDOW
from tests.sglang.engine import HEAD_DIM, HEADS, LAYERS, Engine, Groups, Layer

DRAFT_LAYERS: Final = 2
WINDOW_TOKENS: Final = 24
WINDOW_LESS: Final = 96
"""So many fewer device slots for the sliding window than for the KV."""


def register_draft(engine: Engine, pool: Any) -> None:
    """As SGLang does once the cache is built."""
    specs, entries = build_hicache_draft_sidecars(draft_device_pools=(pool,), tree_cache=engine.cache)
    for spec, entry in zip(specs, entries, strict=True):
        engine.cache.register_sidecar_pool(spec, entry)
    engine.unpin_host()


class DraftEngine(Engine):
    """A model with a draft model beside it, whose KV has a pool of its own and follows the slots of the target's."""

    def __init__(self, groups: Groups | None = None, **options: Any) -> None:
        super().__init__(groups, **options)
        self.draft = MHATokenToKVPool(
            size=self.options.device_slots,
            page_size=self.page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=DRAFT_LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        register_draft(self, self.draft)

    def layers(self) -> Iterator[Layer]:
        yield from super().layers()
        for layer in range(DRAFT_LAYERS):
            yield Layer(self.draft.k_buffer[layer], 1, LAYERS + layer)
            yield Layer(self.draft.v_buffer[layer], -1, LAYERS + layer)


class IndexerEngine(Engine):
    """A model with sparse attention in all layers but the first: these have an index key beside each token's KV."""

    def _device_pool(self) -> Any:
        sparse = list(range(1, LAYERS))
        return MiniMaxSparseKVPool(
            size=self.options.device_slots,
            page_size=self.page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            idx_head_dim=HEAD_DIM,
            dense_layer_ids=[0],
            sparse_layer_ids=sparse,
            disable_value_sparse_layer_ids=sparse,
            device="cpu",
            start_layer=0,
            end_layer=LAYERS,
        )

    def layers(self) -> Iterator[Layer]:
        for layer in range(LAYERS):
            yield Layer(self.kv.main_pool.k_buffer[layer], 1, layer)
            yield Layer(self.kv.main_pool.v_buffer[layer], -1, layer)
        for layer, rows in enumerate(self.kv.index_k_pool.k_buffer):
            yield Layer(rows, 1, LAYERS + layer)


class WindowEngine(Engine):
    """A model in which every second layer attends to the last WINDOW_TOKENS tokens only."""

    is_hybrid_swa = True

    def _device_pool(self) -> Any:
        return SWAKVPool(
            size=self.options.device_slots,
            size_swa=self.options.device_slots - WINDOW_LESS,
            page_size=self.page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            swa_attention_layer_ids=list(range(1, LAYERS, 2)),
            full_attention_layer_ids=list(range(0, LAYERS, 2)),
            device="cpu",
        )

    def _allocator(self) -> Any:
        return SWATokenToKVPoolAllocator(
            size=self.options.device_slots,
            size_swa=self.options.device_slots - WINDOW_LESS,
            page_size=self.page_size,
            dtype=torch.float32,
            device="cpu",
            kvcache=self.kv,
            need_sort=False,
        )

    def _window(self) -> int | None:
        return WINDOW_TOKENS

    def device_allocators(self) -> dict[str, Any]:
        return {KV: self.allocator.full_attn_allocator, WINDOW: self.allocator.swa_attn_allocator}

    def allocate(self, count: int) -> Any:
        """With pages of several tokens SGLang's own way needs a kernel, so the two pools are paired here."""
        if self.page_size == 1:
            return super().allocate(count)
        self.allocator.evict_to_free_tokens(self.cache, count)
        if self.allocator.available_size() < count:
            return None
        slots, in_window = (allocator.alloc(count) for allocator in self.device_allocators().values())
        self.allocator.set_full_to_swa_mapping(slots, in_window)
        return slots

    def sizes(self) -> tuple[int, ...]:
        return (*super().sizes(), self.cache.swa_evictable_size(), self.cache.swa_protected_size())

    def locked(self) -> int:
        return super().locked() + int(self.cache.swa_protected_size())

    def _insertion(self, parameters: Any) -> Any:
        """As a request that has decoded past its window: every second one has given up what fell out of it."""
        tokens, start = len(parameters.key), parameters.prev_prefix_len
        fallen_out = tokens - WINDOW_TOKENS - tokens % 8
        if tokens % 32 == 0 and fallen_out > start:
            self.allocator.free_swa(parameters.value[start:fallen_out])
            parameters.set_evicted_seqlen(ComponentType.SWA, fallen_out)
        return parameters

    # --- bytes ----------------------------------------------------------------------------------------------------

    def layers(self) -> Iterator[Layer]:
        for layer, (keys, vals) in enumerate(
            zip(self.kv.full_kv_pool.k_buffer, self.kv.full_kv_pool.v_buffer, strict=True)
        ):
            yield Layer(keys, 1, layer)
            yield Layer(vals, -1, layer)

    def window_layers(self) -> Iterator[Layer]:
        for layer, (keys, vals) in enumerate(
            zip(self.kv.swa_kv_pool.k_buffer, self.kv.swa_kv_pool.v_buffer, strict=True)
        ):
            yield Layer(keys, 1, LAYERS + layer)
            yield Layer(vals, -1, LAYERS + layer)

    def stamp(self, slots: Any, tokens: Sequence[int]) -> None:
        super().stamp(slots, tokens)
        in_window = self.allocator.translate_loc_from_full_to_swa(slots)
        for layer in self.window_layers():
            layer.stamp(in_window, tokens)

    def holds(self, node: int, tokens: Sequence[int]) -> bool:
        slots = self.cache.path_device_indices(node)
        tail = tokens[: len(slots)][-WINDOW_TOKENS:]
        in_window = self.allocator.translate_loc_from_full_to_swa(slots[-WINDOW_TOKENS:])
        whole = bool((in_window > 0).all()) and all(layer.holds(in_window, tail) for layer in self.window_layers())
        return whole and super().holds(node, tokens)

    def wipe(self) -> None:
        super().wipe()
        for layer in self.window_layers():
            layer.rows.fill_(-1e9)


class WindowDraftEngine(WindowEngine):
    """A draft model beside it, whose layers attend to the window alone and follow the target's slots of the window."""

    def __init__(self, groups: Groups | None = None, **options: Any) -> None:
        super().__init__(groups, **options)
        self.draft = SWAKVPool(
            size=self.options.device_slots,
            size_swa=self.options.device_slots - WINDOW_LESS,
            page_size=self.page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            swa_attention_layer_ids=list(range(DRAFT_LAYERS)),
            full_attention_layer_ids=[],
            device="cpu",
        )
        register_draft(self, self.draft)

    def window_layers(self) -> Iterator[Layer]:
        yield from super().window_layers()
        pool = self.draft.swa_kv_pool
        for layer in range(DRAFT_LAYERS):
            yield Layer(pool.k_buffer[layer], 1, 2 * LAYERS + layer)
            yield Layer(pool.v_buffer[layer], -1, 2 * LAYERS + layer)
