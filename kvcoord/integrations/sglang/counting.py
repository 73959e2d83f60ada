"""How many slots one of SGLang's allocators has free, counted again only when something may have changed.

SGLang keeps free slots in tensors, and to ask a tensor for its length costs 10 us when the caches are cold, at every step
once for each pool. But no allocator changes a tensor's length: it binds another one when slots come or go, and beside it
keeps a number, or a second tensor, of what waits to be merged. So the same objects mean the same count.
"""

from collections.abc import Callable
from operator import attrgetter
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
"""What each of SGLang's ways to count looks at. By the method, so that a class which counts in its own way is not meant."""


def free_count(allocator: Any) -> Callable[[], int]:
    """The allocator's own count of its free slots, exact at every call."""
    count: Callable[[], int] = allocator.available_size
    names = _COUNTED.get(getattr(type(allocator), "available_size", None))
    if names is None:
        return count
    objects = attrgetter(*names)
    first: Any = None
    second: Any = None
    counted = 0

    def counted_once() -> int:
        # The objects before the count: a thread that frees slots meanwhile makes the next call count again.
        nonlocal first, second, counted
        now_first, now_second = objects(allocator)
        if now_first is not first or now_second is not second:
            counted = count()
            first, second = now_first, now_second
        return counted

    return counted_once
