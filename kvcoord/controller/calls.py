"""From an engine's call to the method of the cache that serves it. What can never work raises UsageError."""

from collections.abc import Sequence

from kvcoord.controller.cache import Cache
from kvcoord.controller.operations import Call as Caller
from kvcoord.controller.streaming import StreamingCache
from kvcoord.domain import PAGE_KEY_BYTES, PageKey, Reason
from kvcoord.errors import UsageError
from kvcoord.protocol.local import (
    Acquire,
    Advanced,
    Allocate,
    Call,
    Evict,
    Free,
    LoadBack,
    Release,
    WriteThrough,
    split_keys,
)
from kvcoord.protocol.messages import Completion


def serve(cache: Cache, call: Call, who: Caller, pages_max: int) -> None:
    """A call of an engine in lockstep, other than Advance and Agree."""
    if isinstance(call, Acquire):
        cache.acquire(page_keys(call.keys, pages_max), who, landed=call.landed)
    elif isinstance(call, WriteThrough):
        if call.lease:
            cache.write_lease(call.lease, who, deferred=call.deferred)
        else:
            cache.write_slots(page_keys(call.keys, pages_max), call.slots, who, deferred=call.deferred)
    elif isinstance(call, Release):
        cache.release(call.lease, who)
    elif isinstance(call, Allocate):
        cache.allocate(call.count, who)
    elif isinstance(call, Free):
        cache.free(call.slots, who)
    elif isinstance(call, Evict):
        cache.evict(call.tier, call.count, who)
    elif isinstance(call, LoadBack):
        cache.load_slots(page_keys(call.keys, pages_max), call.slots, who, landed=call.landed)
    else:
        raise UsageError("call", type(call).__name__, "is answered by the worker process, not by its machine")


def serve_streaming(cache: StreamingCache, call: Call, who: Caller, pages_max: int) -> None:
    """A call of an engine without lockstep, other than Agree."""
    if isinstance(call, WriteThrough) and not call.lease:
        cache.write(page_keys(call.keys, pages_max), call.slots, call.operation, who)
    elif isinstance(call, LoadBack):
        cache.load(page_keys(call.keys, pages_max), call.slots, call.operation, who, landed=call.landed)
    else:
        raise UsageError("call", type(call).__name__, "needs a group in lockstep: set group.lockstep=true")


def page_keys(joined: bytes, pages_max: int) -> list[PageKey]:
    """The keys of one call."""
    if not joined or len(joined) % PAGE_KEY_BYTES:
        raise UsageError("keys", len(joined), f"give one or more page keys of {PAGE_KEY_BYTES} bytes each")
    if len(joined) > PAGE_KEY_BYTES * pages_max:
        pages = len(joined) // PAGE_KEY_BYTES
        raise UsageError("keys", pages, f"name at most pages_per_operation_max={pages_max} pages in one call")
    return split_keys(joined)


def advanced(cache: Cache, step: int, verdict: int, completed: Sequence[Completion]) -> Advanced:
    """What a step is answered: the outcomes since the last one, and the operations that have ended with it."""
    state = cache.state
    outcomes, state.outcomes = state.outcomes, []
    broken, state.broken = state.broken, []
    ended = [completion.operation for completion in completed if completion.ok]
    retracted = [
        (completion.operation, completion.reason or Reason.COPY_FAILED, completion.rank)
        for completion in completed
        if not completion.ok
    ]
    return Advanced(step, verdict, outcomes, ended, retracted, cache.open_count(), broken)
