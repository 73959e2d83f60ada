"""A request that gives up its device slots keeps its KV on the host of every rank, or on none."""

import types
from typing import Any

import torch

from tests.sglang.engine import LAYERS, Engine, Groups
from tests.sglang.world import run_ranks, values

TOKENS = list(range(3000, 3033))


def request(engine: Engine) -> Any:
    """A running request whose KV is on the device and not in the tree."""
    slots = engine.allocate(len(TOKENS))
    engine.stamp(slots, TOKENS)
    rows = engine.cache.req_to_token_pool.req_to_token
    rows[0, : len(TOKENS)] = slots.to(rows.dtype)
    return types.SimpleNamespace(rid="request", seqlen=len(TOKENS) + 1, kv=types.SimpleNamespace(req_pool_idx=0))


def backed_up(left_on_rank_1: int) -> list[Any]:
    def on_rank(groups: Groups) -> Any:
        engine = Engine(groups)
        running = request(engine)
        if groups.rank == 1:
            engine.host.alloc(engine.host.available_size() - left_on_rank_1)
        engine.step(3)
        backup = engine.cache.backup_kv_cache(running)
        restored = None
        if backup is not None:
            engine.wipe()
            engine.cache.restore_kv_cache(running, backup)
            rows = engine.cache.req_to_token_pool.req_to_token[0, : len(TOKENS)].long()
            expected = torch.tensor(TOKENS, dtype=torch.float32)[:, None, None]
            restored = all(bool((engine.kv.k_buffer[layer][rows] == expected + layer).all()) for layer in range(LAYERS))
        engine.step(3)
        engine.close()
        return backup is not None, restored

    return values(run_ranks(on_rank))


def test_a_retracted_request_comes_back_with_its_bytes() -> None:
    assert backed_up(left_on_rank_1=64) == [(True, True)] * 2


def test_a_request_that_one_rank_cannot_keep_is_kept_by_none() -> None:
    assert backed_up(left_on_rank_1=16) == [(False, None)] * 2
