"""How many slots one of SGLang's allocators has free, counted again only when something may have changed.

SGLang keeps free slots in tensors. To ask a tensor for its length costs some 20 us in cold caches, at every step and
for every pool. But no allocator changes a tensor's length: it binds another one when slots come or go, and keeps beside
it a number, or a second tensor, of what waits to be merged. So the same objects mean the same count.
"""

from collections.abc import Callable
from typing import Any, Final

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

_COUNTED: Final[dict[object, tuple[str, str]]] = {
    TokenToKVPoolAllocator.available_size: ("free_pages", "release_pages"),
    PagedTokenToKVPoolAllocator.available_size: ("free_pages", "num_staged_pages"),
    MambaSlotAllocator.available_size: ("free_slots", "size"),
    HostKVCache.available_size: ("free_slots", "num_release_slots"),
    MambaPoolHost.available_size: ("free_slots", "num_release_slots"),
}
"""What SGLang's ways to count look at. By the method: a class that counts in a way of its own is not meant."""


def free_count(allocator: Any) -> Callable[[], int]:
    """The allocator's own count of its free slots, exact at every call."""
    count: Callable[[], int] = allocator.available_size
    names = _COUNTED.get(getattr(type(allocator), "available_size", None))
    if names is None:
        return count
    held, (first, second) = vars(allocator), names
    known: tuple[Any, Any, int] = None, None, 0

    def known_or_counted() -> int:
        # Kept, replaced and read as one: metrics ask from another thread. What was looked at before the count and has
        # changed since never comes back, because numbers of what waits only grow until the next tensor.
        nonlocal known
        first_known, second_known, counted = known
        first_now, second_now = held[first], held[second]
        if first_now is not first_known or second_now is not second_known:
            counted = count()
            known = first_now, second_now, counted
        return counted

    return known_or_counted
