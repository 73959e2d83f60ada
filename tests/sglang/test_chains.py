"""Nodes that hang together: a child is on the host only below its parent, and what is stored is told parent first."""

from typing import Any

import pytest
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium

from tests.sglang.engine import Engine
from tests.sglang.slow import SlowCopies
from tests.sglang.test_behaviours import OTHER, TOKENS, fill_host, on_two_ranks

PARENT, CHILD = TOKENS[:32], TOKENS


def on_host(engine: Engine) -> tuple[bool, bool]:
    """Are parent and child on the host?"""
    parent, child = (engine.match(tokens).last_device_node for tokens in (PARENT, CHILD))
    return engine.cache.is_backuped(parent), engine.cache.is_backuped(child)


def extend(engine: Engine) -> None:
    """A request goes on where another one has ended."""
    engine.insert(CHILD, start=len(PARENT))


def test_a_child_that_is_wanted_while_its_parent_is_voted_on_comes_to_the_host_after_it() -> None:
    def scenario(engine: Engine, _: int) -> Any:
        engine.insert(PARENT)
        engine.step()
        extend(engine)
        seen = []
        for _ in range(6):
            engine.step()
            seen.append(on_host(engine))
        return seen, engine.cache.protected_size()

    first, second = on_two_ranks(scenario)
    assert first == second
    seen, locked = first
    assert (False, True) not in seen
    assert (seen[-1], locked) == ((True, True), 0)


def test_a_child_whose_parent_is_dropped_is_dropped_as_well() -> None:
    """Rank 1 has room for the child alone."""

    def scenario(engine: Engine, rank: int) -> Any:
        held = fill_host(engine, 31) if rank == 1 else None
        engine.insert(PARENT)
        engine.step()
        extend(engine)
        engine.step(6)
        assert held is None or len(held)
        return on_host(engine), engine.cache.protected_size(), len(engine.cache.agreement.writes)

    assert on_two_ranks(scenario) == [((False, False), 0, 0)] * 2


def told(engine: Engine) -> list[tuple[str, list[int]]]:
    """What the cache has said of the host since it was asked last."""
    events = [event for event in engine.cache.take_events() if getattr(event, "medium", None) == StorageMedium.CPU]
    return [
        ("stored", list(event.token_ids)) if isinstance(event, BlockStored) else ("removed", [])
        for event in events
        if isinstance(event, BlockStored | BlockRemoved)
    ]


@pytest.mark.parametrize("split_at_step", [0, 1, 2], ids=["intended", "reserved", "copied"])
def test_a_node_that_is_split_while_it_is_written_is_told_once_in_order_when_its_copy_is_over(
    split_at_step: int,
) -> None:
    def scenario(engine: Engine, _: int) -> Any:
        copies = SlowCopies(engine, lambda: 3)
        engine.insert(TOKENS)
        early = []
        for step in range(4):
            if step == split_at_step:
                engine.match(TOKENS[:16] + OTHER[:8])
            engine.step()
            early += told(engine)
        copies.now += 3
        engine.step(4)
        return early, told(engine)

    for early, late in on_two_ranks(scenario, kv_events=True):
        assert early == []
        assert {what for what, _ in late} == {"stored"}
        assert [token for _, tokens in late for token in tokens] == TOKENS


def test_a_write_that_is_aborted_is_never_told() -> None:
    def scenario(engine: Engine, rank: int) -> Any:
        held = fill_host(engine, 32) if rank == 1 else None
        engine.insert(TOKENS)
        engine.step(6)
        assert held is None or len(held)
        return told(engine)

    assert on_two_ranks(scenario, kv_events=True) == [[], []]
