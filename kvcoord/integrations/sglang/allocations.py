"""SGLang's allocations on the device, held to the agreed capacity: made on every rank, or refused on every rank."""

from collections.abc import Callable
from typing import Any, NoReturn

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvcoord.errors import InvariantBroken
from kvcoord.integrations.sglang.capacity import KV, Capacity
from kvcoord.integrations.sglang.components import COMPONENTS, STATE, WINDOW, Pools

Allocate = Callable[[int], Any]
"""So many slots, or None."""


def watch(cache: Any, pools: Pools, capacity: Capacity) -> None:
    """Shows SGLang the agreed free counts, and lets no allocation that the group counts on fail in silence."""
    guard = _Guard(capacity)
    allocator, controller = cache.token_to_kv_pool_allocator, cache.cache_controller
    if WINDOW in pools.names:
        allocator.full_available_size = lambda: capacity.device_available(KV)
        allocator.swa_available_size = lambda: capacity.device_available(WINDOW)
        allocator.available_size = lambda: min(map(capacity.device_available, (KV, WINDOW)))
        entry = controller.mem_pool_host.get_entry(PoolName(WINDOW))
        entry.device_alloc_fn = guard.agreed(WINDOW, entry.device_alloc_fn)
    else:
        allocator.available_size = capacity.device_available
    if STATE in pools.names:
        states = cache.req_to_token_pool.mamba_allocator
        states._do_alloc = guard.agreed(STATE, states._do_alloc)
        states.available_size = lambda: capacity.device_available(STATE)
    controller.load = guard.load(controller.load)


def has_state_for(cache: Any, capacity: Capacity, node: int, request: Any) -> bool:
    """May this request load this node? SGLang takes a state for the request first, and cannot be refused one.

    False: on some rank there is none, and nothing that could be evicted for it.
    """
    if request is None or request.kv.holds_mamba:
        return True
    if not cache.tree_core.component_has_host_value_only(node, COMPONENTS[STATE]):
        return True
    if not capacity.device_available(STATE):
        lock = cache.inc_lock_ref(node).to_dec_params()
        cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        cache.dec_lock_ref(node, lock)
    return capacity.device_available(STATE) > 0


class _Guard:
    """The device slots of a load-back, and the states of requests.

    SGLang evicts when an allocation is refused and asks once more. Both follow from the agreed capacity, so that all
    ranks evict, and then go on or give up, together.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._refused = False

    def agreed(self, pool: str, allocate: Allocate) -> Allocate:
        def allocated(slots: int) -> Any:
            self._refused = slots > self._capacity.device_available(pool)
            if self._refused:
                return None
            taken = allocate(slots)
            if taken is None:
                broken_promise(f"allocation from device.{pool}", slots)
            return taken

        return allocated

    def load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*arguments: Any, **options: Any) -> Any:
            self._refused = False
            device_slots = load(*arguments, **options)
            if device_slots is None and not self._refused:
                broken_promise("load-back", len(options.get("host_indices", ())))
            return device_slots

        return loaded


def broken_promise(what: str, slots: int) -> NoReturn:
    """What the agreed capacity covers has failed. That breaks an invariant; no rank lives with it alone."""
    detail = f"{what} of {slots} slots is covered by the agreed capacity and failed on this rank"
    raise InvariantBroken("what is covered can be allocated on every rank", detail)
