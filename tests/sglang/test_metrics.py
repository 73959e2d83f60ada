"""Each rank shows its own metrics, when it is told where."""

import urllib.request
from typing import Any

import torch

from tests.sglang.engine import Engine, Groups
from tests.sglang.world import run_ranks, values

TOKENS = list(range(1000, 1064))


def page(engine: Engine, route: str) -> str:
    address = engine.cache.agreement.http_address
    with urllib.request.urlopen(f"http://{address}{route}", timeout=30) as answer:
        return str(answer.read().decode())


def test_a_rank_counts_what_its_group_decided_and_shows_it_on_a_port_of_its_own() -> None:
    def on_rank(groups: Groups) -> Any:
        engine = Engine(groups)
        held = engine.host.alloc(engine.host.available_size() - 32) if groups.rank == 1 else None
        engine.insert(TOKENS)
        engine.step(4)
        lines = page(engine, "/metrics").splitlines()
        ready = page(engine, "/readyz")
        assert held is None or len(held)
        torch.distributed.barrier(groups.tp_group)  # A rank that has left is no part of a group that is ready.
        engine.close()
        return [line for line in lines if "decisions_total{" in line or "held_back" in line], ready

    first, second = values(run_ranks(on_rank, environment={"KVCOORD_HTTP": "127.0.0.1:0"}))
    aborted = 'operation="write-through",outcome="abort",path="voted",rank="{}",reason="host_full"'
    for rank, (lines, ready) in enumerate((first, second)):
        assert ready == "ready\n"
        assert any(aborted.format(rank) in line for line in lines)
    assert 'kvcoord_sglang_held_back_slots{group="sglang",pool="host.kv",rank="0"} 480.0' in first[0]
    assert 'kvcoord_sglang_held_back_slots{group="sglang",pool="host.kv",rank="1"} 0.0' in second[0]


def test_without_an_address_no_port_is_opened() -> None:
    def on_rank(groups: Groups) -> Any:
        engine = Engine(groups)
        address = engine.cache.agreement.http_address
        engine.close()
        return address

    assert values(run_ranks(on_rank, tp=1)) == [""]
