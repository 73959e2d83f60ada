"""Engines of models that keep more than one pool: SGLang's own pools, allocators and host stacks, on a CPU."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_hicache_draft_sidecars
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MiniMaxSparseKVPool

from tests.sglang.engine import HEAD_DIM, HEADS, LAYERS, Engine, Groups, Layer

DRAFT_LAYERS: Final = 2


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
        specs, entries = build_hicache_draft_sidecars(draft_device_pools=(self.draft,), tree_cache=self.cache)
        for spec, entry in zip(specs, entries, strict=True):
            self.cache.register_sidecar_pool(spec, entry)

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
