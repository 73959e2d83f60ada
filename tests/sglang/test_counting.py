"""Free slots are counted again only when SGLang's lists are others than before, and are never counted wrong."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from kvcoord.integrations.sglang.counting import free_count
from tests.sglang.engine import STOCK, Engine, Groups
from tests.sglang.hybrid import WindowEngine
from tests.sglang.states import StateEngine
from tests.sglang.world import run_ranks, values

SLOTS = 64


def wrong_after(allocator: Any, steps: int = 300) -> int:
    """How often the count differs from the allocator's own, while slots are taken, given back and all forgotten."""
    rng, free, held, wrong = random.Random(5), free_count(allocator), [], 0
    page = getattr(allocator, "page_size", 1)
    for _ in range(steps):
        step = rng.random()
        if step < 0.5:
            taken = allocator.alloc(rng.randint(1, 4) * page)
            held += [] if taken is None else [taken]
        elif step < 0.97 and held:
            allocator.free(held.pop(rng.randrange(len(held))))
        elif step > 0.99:
            allocator.clear()
            held.clear()
        wrong += sum(free() != type(allocator).available_size(allocator) for _ in range(2))
    return wrong


def pools(make: Callable[[Groups], Engine]) -> dict[str, int]:
    def on_rank(groups: Groups) -> dict[str, int]:
        engine = make(groups)
        allocators = {f"device.{pool}": allocator for pool, allocator in engine.device_allocators().items()}
        allocators |= {f"host.{pool}": allocator for pool, allocator in engine.host_pools().items()}
        return {pool: wrong_after(allocator) for pool, allocator in allocators.items()}

    (found,) = values(run_ranks(on_rank, tp=1))
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("engine", "page_size"), [(Engine, 1), (Engine, 4), (WindowEngine, 1), (WindowEngine, 4), (StateEngine, 1)]
)
def test_the_count_of_every_pool_is_its_own_after_every_change(engine: type[Engine], page_size: int) -> None:
    found = pools(lambda groups: engine(groups, backend=STOCK, page_size=page_size))
    assert set(found.values()) == {0}


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_waits_to_be_sorted_is_counted(page_size: int) -> None:
    kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
    paged = {} if page_size == 1 else {"page_size": page_size}
    assert wrong_after(kind(size=SLOTS, dtype=torch.float32, device="cpu", kvcache=None, need_sort=True, **paged)) == 0


def test_nobody_is_asked_again_while_nothing_was_taken_or_given_back() -> None:
    allocator: Any = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", None, need_sort=False)
    own = allocator.available_size
    asked: list[int] = []

    def ask() -> int:
        asked.append(own())
        return asked[-1]

    allocator.available_size = ask
    free = free_count(allocator)
    assert [free(), free()] == [SLOTS, SLOTS]
    slots = allocator.alloc(8)
    assert [free(), free()] == [SLOTS - 8, SLOTS - 8]
    allocator.free(slots)
    assert [free(), free()] == [SLOTS, SLOTS]
    assert asked == [SLOTS, SLOTS - 8, SLOTS]


class OtherWay(TokenToKVPoolAllocator):  # type: ignore[misc]
    """Counts what the lists do not say."""

    lent = 0

    def available_size(self) -> int:
        return int(super().available_size()) - self.lent


def test_an_allocator_that_counts_in_its_own_way_is_asked_every_time() -> None:
    allocator = OtherWay(SLOTS, torch.float32, "cpu", None, need_sort=False)
    free = free_count(allocator)
    assert free() == SLOTS
    allocator.lent = 5
    assert free() == SLOTS - 5
