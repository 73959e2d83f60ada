"""What of SGLang this integration covers: refusals that say why and what to do, and what all ranks must have in common.

A configuration that is not covered is refused when the engine starts. It is never run with decisions that one rank
takes alone.
"""

from importlib.metadata import version
from typing import Any

from kvcoord.errors import UsageError
from kvcoord.integrations.sglang.topology import Topology

_INSTEAD = "start this engine without --radix-cache-backend kvcoord until a release of kvcoord supports it"

NO_STORAGE = (
    "for a model with a sliding window or states storage takes host slots of several pools while pages arrive, by rank:"
    f" drop it, or {_INSTEAD}"
)

_PARTS = ("FULL", "SWA", "MAMBA")
"""The parts of SGLang's tree that are supported, and the host pools that have slots of their own."""

_POOLS = ("kv", "swa", "mamba")


def refuse_before_building(context: Any) -> None:
    """Checks SGLang's TreeCacheBuildContext. Raises UsageError for the first thing that is not supported."""
    arguments = context.server_args
    if context.disable_radix_cache:
        _refuse("--disable-radix-cache", True, "leaves nothing to agree on: drop it or --radix-cache-backend kvcoord")
    if not context.enable_hierarchical_cache:
        fix = "kvcoord agrees on the host tier: add --enable-hierarchical-cache or drop --radix-cache-backend kvcoord"
        _refuse("--enable-hierarchical-cache", False, fix)
    for flag in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"):
        if getattr(arguments, flag):
            _refuse(flag, True, f"has a cache of its own, which kvcoord does not know: drop it, or {_INSTEAD}")
    if arguments.disaggregation_mode != "null":
        fix = f"prefill-decode disaggregation decides outside the cache's step: {_INSTEAD}"
        _refuse("--disaggregation-mode", arguments.disaggregation_mode, fix)
    if context.is_hybrid_ssm and context.is_hybrid_swa:
        _refuse("model", "mamba with a sliding window", f"no test has shown that its ranks stay together: {_INSTEAD}")
    if context.is_hybrid_swa and context.full_tokens_per_layer == 0:
        fix = f"a model with no full attention has another cache in SGLang, without a host tier: {_INSTEAD}"
        _refuse("model", "sliding window only", fix)


def refuse_unsupported(cache: Any, arguments: Any) -> None:
    """Checks the cache once SGLang has set it up. Raises UsageError for the first thing that is not supported."""
    if cache.host_memory_mode != "cache":
        fix = f"kvcoord agrees on a host tier, not on staging: use cache, or {_INSTEAD}"
        _refuse("--hicache-host-memory-mode", cache.host_memory_mode, fix)
    unknown = [part.name for part in cache.tree_components if part.name not in _PARTS]
    if unknown:
        _refuse("tree components", unknown, f"are not known, only {', '.join(_PARTS)}: {_INSTEAD}")
    allocator = cache.token_to_kv_pool_allocator
    if not hasattr(allocator, "available_size"):
        _refuse("allocator", type(allocator).__name__, f"is not known: {_INSTEAD}")
    if len(cache.tree_components) > 1:
        _refuse_hybrid(cache, arguments)
    if cache.cache_controller.is_kv_sharded:
        _refuse("--enable-kv-cache-sharding", True, f"host slots then belong to single ranks: {_INSTEAD}")
    followers = {spec.pool_name for spec in cache.sidecar_pool_specs}
    entries = cache.cache_controller.mem_pool_host.entries
    own = [entry.name.value for entry in entries if entry.name not in followers and entry.name.value not in _POOLS]
    if own:
        _refuse("host pools", own, f"have slots of their own that no part of the tree names: {_INSTEAD}")
    if cache.cache_controller.mem_pool_host.anchor_entry.host_pool.dcp_size > 1:
        _refuse("--dcp-size", "more than 1", f"several tokens then share one host slot: {_INSTEAD}")
    if cache.cache_controller.mem_pool_host.anchor_entry.host_pool.shared_allocation_domain is not None:
        _refuse("host pool", "shared arena", f"its room is counted in bytes of several pools: {_INSTEAD}")


def _refuse_hybrid(cache: Any, arguments: Any) -> None:
    """A tree with more than full attention."""
    allocator = cache.token_to_kv_pool_allocator
    if cache.supports_swa() and (type(allocator).__name__ != "SWATokenToKVPoolAllocator" or allocator.swa_req_ring):
        fix = f"the sliding window's slots are not counted apart from the KV's: {_INSTEAD}"
        _refuse("allocator", type(allocator).__name__, fix)
    if cache.supports_mamba():
        states = cache.req_to_token_pool
        if type(states.mamba_allocator).__name__ != "MambaSlotAllocator":
            fix = f"the states' slots are not counted apart from the KV's: {_INSTEAD}"
            _refuse("state allocator", type(states.mamba_allocator).__name__, fix)
        if states.mamba_ckpt_pool is not None:
            fix = f"checkpoints have a pool of their own, which kvcoord does not know: drop it, or {_INSTEAD}"
            _refuse("--enable-int8-mamba-checkpoint", True, fix)
    if arguments.hicache_storage_backend is not None:
        _refuse("--hicache-storage-backend", arguments.hicache_storage_backend, NO_STORAGE)


def lag_min(arguments: Any, topology: Topology) -> int:
    """How many steps the first stage of this engine may be ahead of the last one: the smallest lag that never waits."""
    if topology.pp == 1:
        return 1
    return topology.pp + int(arguments.pp_async_batch_depth)


def settings_fingerprint(cache: Any, arguments: Any) -> dict[str, str | int]:
    """What all ranks must have set alike, by the name it has in SGLang."""
    return {
        "sglang": version("sglang"),
        "page_size": cache.page_size,
        "tree_core": type(cache.tree_core).__name__,
        "tree_components": ",".join(component.name for component in cache.tree_components),
        "sliding_window_size": cache.sliding_window_size or 0,
        "hicache_write_policy": cache.cache_controller.write_policy,
        "write_through_threshold": cache.write_through_threshold,
        "radix_eviction_policy": str(arguments.radix_eviction_policy),
        "hicache_storage_backend": str(arguments.hicache_storage_backend),
        "hicache_storage_prefetch_policy": cache.prefetch_stop_policy,
    }


def group_suffix(parallel: Any) -> str:
    """With data-parallel attention every data-parallel rank has a scheduler, and so a group, of its own."""
    return f"-dp{parallel.attn_dp_rank}" if parallel.attn_dp_size > 1 else ""


def _refuse(field: str, value: object, fix: str) -> None:
    raise UsageError(field, value, fix)
