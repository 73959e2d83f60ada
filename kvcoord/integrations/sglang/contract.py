"""What of SGLang this integration relies on, and whether an installation or a wheel still has it that way.

Nearly every hook is a private name, and private names move between releases. So the supported releases are listed, and
of each hook the signature and the body are compared with those that the integration was written against. Sources are
read, never imported: a wheel can be checked on any machine.

    python -m kvcoord.integrations.sglang.contract [WHEEL | FOLDER]      what changed, if anything
    python -m kvcoord.integrations.sglang.contract --record              writes `contract.json` from what is installed
"""

import ast
import hashlib
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.errors import UsageError

SUPPORTED: Final = ("0.5.23",)

HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "srt/mem_cache/unified_radix_cache.py": (
        *("_OngoingWriteThrough", "_OngoingLoadBack", "_OngoingPrefetch", "UnifiedRadixCache.__init__"),
        *("UnifiedRadixCache.init_hicache", "UnifiedRadixCache.reset", "UnifiedRadixCache.shutdown"),
        *("UnifiedRadixCache._reset_full", "UnifiedRadixCache._component_available_size"),
        *("UnifiedRadixCache._all_reduce_attn_groups", "UnifiedRadixCache._pp_sync", "UnifiedRadixCache._all_reduce"),
        *("UnifiedRadixCache.insert", "UnifiedRadixCache.evict", "UnifiedRadixCache.evict_for_alloc"),
        *("UnifiedRadixCache._evict", "UnifiedRadixCache._evict_components", "UnifiedRadixCache.evict_host"),
        *("UnifiedRadixCache._evict_device_leaf", "UnifiedRadixCache._drop_subtree_no_host"),
        *("UnifiedRadixCache._execute_and_commit_kv_backup", "UnifiedRadixCache._execute_kv_backup"),
        *("UnifiedRadixCache._track_write_through_node", "UnifiedRadixCache._finish_write_through_ack"),
        *("UnifiedRadixCache._build_backup_sidecar", "UnifiedRadixCache._build_sidecar_transfers"),
        *("UnifiedRadixCache._replace_pending_write_through_node", "UnifiedRadixCache._apply_cache_action"),
        *("UnifiedRadixCache.backup_node_for_write_back", "UnifiedRadixCache.backup_kv_cache"),
        *("UnifiedRadixCache.load_back", "UnifiedRadixCache._load_back_transfers", "UnifiedRadixCache.init_load_back"),
        *("UnifiedRadixCache.writing_check", "UnifiedRadixCache.loading_check"),
        *("UnifiedRadixCache.check_hicache_events", "UnifiedRadixCache.flush_pending_backups"),
        *("UnifiedRadixCache._sync_hicache_ready_counts", "UnifiedRadixCache.has_free_load_back_slot"),
        *("UnifiedRadixCache._drain_storage_control_queues_impl", "UnifiedRadixCache.drain_storage_control_queues"),
        *("UnifiedRadixCache.prefetch_from_storage", "UnifiedRadixCache.check_prefetch_progress"),
        *("UnifiedRadixCache._can_terminate_prefetch", "UnifiedRadixCache._prefetch_deadline_expired"),
        *("UnifiedRadixCache._start_storage_prefetch_wait", "UnifiedRadixCache._handle_prefetch_result"),
        *("UnifiedRadixCache._retire_ongoing_prefetch", "UnifiedRadixCache.revoke_pending_prefetch"),
        *("UnifiedRadixCache.attach_storage_backend", "UnifiedRadixCache.detach_storage_backend"),
        *("UnifiedRadixCache.write_backup_storage", "UnifiedRadixCache.query_storage_hit_length"),
        *("UnifiedRadixCache._evict_device_next_node", "UnifiedRadixCache._apply_eviction_result"),
        *("UnifiedRadixCache._backup_publish_node_ids", "UnifiedRadixCache._retraction_device_transfers"),
        *("UnifiedRadixCache._drain_host_frees", "UnifiedRadixCache.register_sidecar_pool"),
    ),
    "srt/mem_cache/unified_cache/unified_tree_core_interface.py": (
        *("TreePathNodeInfo", "UnifiedTreeCoreInterface.collect_path_info", "UnifiedTreeCoreInterface.commit_backup"),
        *("UnifiedTreeCoreInterface.build_backup_spec", "UnifiedTreeCoreInterface.mark_write_through_pending"),
        *("UnifiedTreeCoreInterface.inc_lock_ref", "UnifiedTreeCoreInterface.dec_lock_ref"),
        *("UnifiedTreeCoreInterface.is_backuped", "UnifiedTreeCoreInterface.drive_host_eviction"),
        *("BaseEvictionResult", "UnifiedTreeCoreInterface.component_evictable_size"),
        *(
            "UnifiedTreeCoreInterface.component_protected_size",
            "UnifiedTreeCoreInterface.component_has_host_value_only",
        ),
    ),
    "srt/mem_cache/unified_cache/unified_tree_core.py": (
        *("UnifiedTreeCore._inc_hit_count_and_check", "UnifiedTreeCore._build_backup_kv_action"),
        *("UnifiedTreeCore._split_node", "UnifiedTreeCore.insert_host", "UnifiedTreeCore.commit_backup"),
        *("UnifiedTreeCore.drive_host_eviction", "UnifiedTreeCore.evict_device_leaf"),
        *("UnifiedTreeCore._reclaim_full_host_duplicates", "UnifiedTreeCore._release_full_host_duplicate"),
    ),
    "srt/mem_cache/unified_cache/components/full.py": (
        *("FullComponent.acquire_component_lock", "FullComponent.drive_host_eviction"),
        *("FullComponent.redistribute_on_node_split", "FullComponent._evict_device_next_node"),
    ),
    "srt/mem_cache/unified_cache/component_type.py": ("ComponentType",),
    "srt/mem_cache/unified_cache/components/swa.py": (
        *("SWAComponent._collect_unbacked_swa_nodes_in_window", "SWAComponent.build_hicache_transfers"),
        *("SWAComponent.commit_hicache_transfer", "SWAComponent.drive_host_eviction", "SWAComponent.free_host_values"),
        *("SWAComponent._evict_device_next_node", "SWAComponent.acquire_component_lock"),
    ),
    "srt/mem_cache/unified_cache/components/mamba.py": (
        *("MambaComponent.prepare_load_back", "MambaComponent.finalize_load_back", "MambaComponent._alloc_mamba_slot"),
        *("MambaComponent._alloc_request_state_slot", "MambaComponent.finalize_match_result_in_cache"),
        *("MambaComponent.build_hicache_transfers", "MambaComponent.commit_hicache_transfer"),
        *("MambaComponent.drive_host_eviction", "MambaComponent.free_host_values"),
        *("MambaComponent._evict_device_next_node", "MambaComponent.acquire_component_lock"),
    ),
    "srt/mem_cache/unified_cache/cache_action.py": ("BackupKV",),
    "srt/mem_cache/allocator/base.py": ("BaseTokenToKVPoolAllocator.merge_and_sort_free",),
    "srt/mem_cache/allocator/token.py": (
        *("TokenToKVPoolAllocator.available_size", "TokenToKVPoolAllocator.alloc", "TokenToKVPoolAllocator.free"),
        "TokenToKVPoolAllocator.clear",
    ),
    "srt/mem_cache/allocator/paged.py": (
        *("PagedTokenToKVPoolAllocator.available_size", "PagedTokenToKVPoolAllocator.merge_and_sort_free"),
        *("PagedTokenToKVPoolAllocator.alloc", "PagedTokenToKVPoolAllocator.alloc_extend"),
        *("PagedTokenToKVPoolAllocator.alloc_decode", "PagedTokenToKVPoolAllocator._release_page_ids"),
        "PagedTokenToKVPoolAllocator.clear",
    ),
    "srt/mem_cache/allocator/swa.py": (
        *("SWATokenToKVPoolAllocator.available_size", "SWATokenToKVPoolAllocator.full_available_size"),
        *("SWATokenToKVPoolAllocator.swa_available_size", "SWATokenToKVPoolAllocator.alloc"),
        *("SWATokenToKVPoolAllocator.evict_to_free_tokens", "SWATokenToKVPoolAllocator.swa_req_ring"),
    ),
    "srt/mem_cache/allocator/mamba.py": (
        *("MambaSlotAllocator.available_size", "MambaSlotAllocator.schedulable_available_size"),
        *("MambaSlotAllocator.alloc", "MambaSlotAllocator._do_alloc", "MambaSlotAllocator.alloc_group_begin"),
        *("MambaSlotAllocator.free", "MambaSlotAllocator.clear"),
    ),
    "srt/mem_cache/allocation.py": ("ensure_mamba_capacity",),
    "srt/mem_cache/hicache_storage.py": ("PoolName", "PoolTransfer"),
    "srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py": (
        *("_evict_swa_for_device_alloc", "_swa_allocation_callbacks", "build_hybrid_swa_group"),
        *("build_full_draft_pools", "build_minimax_sparse_hicache_stack"),
        *("_evict_mamba_for_device_alloc", "build_hybrid_mamba_stack"),
    ),
    "srt/managers/cache_controller.py": (
        *("CacheOperation.__init__", "HiCacheAck", "PrefetchAck", "LayerDoneCounter.update_producer"),
        *("HiCacheController.start_writing", "HiCacheController.start_loading", "HiCacheController.reset"),
        *("HiCacheController.prefetch_thread_func", "HiCacheController.prefetch_io_aux_func"),
        *("HiCacheController.prefetch_sync_thread_func", "HiCacheController.backup_thread_func"),
        *("HiCacheController._start_storage_threads", "HiCacheController._page_transfer"),
        *("HiCacheController._stop_storage_threads", "HiCacheController._create_sync_groups"),
        *("HiCacheController.attach_storage_backend", "HiCacheController.detach_storage_backend"),
    ),
    "srt/mem_cache/unified_cache/storage_attachment.py": (
        *("StorageAttachment.attach", "StorageAttachment.detach", "StorageAttachment.shutdown"),
        "StorageAttachment._release_pending_storage_ops",
    ),
    "srt/mem_cache/hybrid_cache/hybrid_cache_controller.py": (
        *("HybridCacheController.write", "HybridCacheController.load", "HybridCacheController.allocate_storage_hit"),
        *("HybridCacheController.allocate_host_transfers", "HybridCacheController.alloc_prefetch_host_buffers"),
        *("HybridCacheController.append_host_mem_release", "HybridCacheController.reset"),
        *("StorageOperation.__init__", "PrefetchOperation.__init__", "HybridCacheController._page_transfer"),
        "HybridCacheController._resolve_device_transfers",
    ),
    "srt/mem_cache/pool_host/group.py": (
        *("PoolEntry", "HostPoolGroup.alloc", "HostPoolGroup.free", "HostPoolGroup.available_size"),
        *("HostPoolGroup.resolve_host_transfers", "HostPoolGroup.release_transfers"),
        *("HostPoolGroup.get_entry", "HostPoolGroup.get_pool"),
    ),
    "srt/mem_cache/pool_host/base.py": (
        *("HostKVCache.alloc", "HostKVCache.free", "HostKVCache.available_size", "HostKVCache.clear"),
        "HostKVCache._merge_release_slots",
    ),
    "srt/mem_cache/pool_host/mamba.py": (
        *("MambaPoolHost.alloc", "MambaPoolHost.free", "MambaPoolHost.available_size", "MambaPoolHost.clear"),
    ),
    "srt/mem_cache/cache_init_params.py": ("CacheInitParams",),
    "srt/mem_cache/registry.py": (
        *("TreeCacheBuildContext", "register_radix_cache_backend", "create_unified_radix_cache", "create_tree_cache"),
    ),
    "srt/managers/scheduler.py": ("Scheduler._process_hicache_events",),
    "srt/plugins/__init__.py": ("load_plugins",),
}
"""Classes, methods and functions by file, below the package's folder."""

_RECORD: Final = Path(__file__).with_name("contract.json")


class Hook(msgspec.Struct, frozen=True):
    """How one hook looked: its signature (of a class: its fields) and a fingerprint of all of it."""

    signature: str
    fingerprint: str


Record = dict[str, dict[str, Hook]]

Read = Callable[[str], str | None]
"""The text of a file of SGLang, None when there is none."""


def check_contract() -> None:
    """Raises UsageError when the installed SGLang is not a supported one, or not the one this was written against."""
    found = _installed_version()
    if found not in SUPPORTED:
        raise UsageError("sglang", found, f"kvcoord supports SGLang {', '.join(SUPPORTED)}: install one of these")
    changed = changes(_recorded(), read_installed)
    if changed:
        fix = "this installation differs from the release that kvcoord supports:\n  " + "\n  ".join(changed)
        raise UsageError("sglang", found, fix)


def changes(record: Record, read: Read) -> list[str]:
    """What differs from the record, one line a hook; empty when nothing does."""
    found: list[str] = []
    for file, hooks in record.items():
        text = read(file)
        if text is None:
            found.append(f"{file}: is not there any more")
            continue
        now = _hooks_of(text)
        for name, hook in hooks.items():
            other = now.get(name)
            if other is None:
                found.append(f"{file}: {name} is not there any more")
            elif other.signature != hook.signature:
                found.append(f"{file}: {name} was {hook.signature} and is {other.signature}")
            elif other.fingerprint != hook.fingerprint:
                found.append(f"{file}: {name} has another body")
    return found


def record_of(read: Read) -> Record:
    """The record of all hooks. Raises UsageError for one that is not there."""
    record: Record = {}
    for file, names in HOOKS.items():
        text = read(file)
        hooks = {} if text is None else _hooks_of(text)
        missing = [name for name in names if name not in hooks]
        if missing:
            raise UsageError("hooks", f"{file}: {', '.join(missing)}", "are not there: correct HOOKS")
        record[file] = {name: hooks[name] for name in names}
    return record


def read_installed(file: str) -> str | None:
    """From the installed package, without importing it."""
    spec = find_spec("sglang")
    locations = [] if spec is None else list(spec.submodule_search_locations or ())
    return _read_folder(Path(locations[0]), file) if locations else None


def read_from(source: Path) -> Read:
    """From a wheel, or from a folder that holds the package."""
    if source.is_dir():
        return lambda file: _read_folder(source / "sglang", file)
    archive = zipfile.ZipFile(source)
    names = set(archive.namelist())
    return lambda file: archive.read(f"sglang/{file}").decode() if f"sglang/{file}" in names else None


def _read_folder(folder: Path, file: str) -> str | None:
    path = folder / file
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _hooks_of(text: str) -> dict[str, Hook]:
    """Every class, method and function at the top of a module, by qualified name."""
    lines = text.splitlines()
    hooks: dict[str, Hook] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            hooks[node.name] = _class_hook(node, lines)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    hooks[f"{node.name}.{inner.name}"] = _function_hook(inner, lines)
        elif isinstance(node, ast.FunctionDef):
            hooks[node.name] = _function_hook(node, lines)
    return hooks


def _function_hook(node: ast.FunctionDef, lines: list[str]) -> Hook:
    return Hook(f"({ast.unparse(node.args)})", _fingerprint([*node.decorator_list, node], lines))


def _class_hook(node: ast.ClassDef, lines: list[str]) -> Hook:
    """A class as a record: its bases, and the names and types of its fields."""
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    names = ", ".join(ast.unparse(field) for field in fields)
    return Hook(f"[{names}]", _fingerprint([*node.bases, *fields], lines))


def _fingerprint(nodes: Sequence[ast.expr | ast.stmt], lines: list[str]) -> str:
    """Of the source lines as they are, so that every version of Python finds the same."""
    kept = [line.rstrip() for node in nodes for line in lines[node.lineno - 1 : node.end_lineno]]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def _installed_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "not installed"


def _recorded() -> Record:
    return msgspec.json.decode(_RECORD.read_bytes(), type=Record)


def main(arguments: list[str]) -> int:
    """Prints what changed; 1 when something did."""
    if arguments == ["--record"]:
        _RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(record_of(read_installed)), indent=1) + b"\n")
        return 0
    read = read_from(Path(arguments[0])) if arguments else read_installed
    found = changes(_recorded(), read)
    for line in found:
        print(line)
    print(f"{len(found)} of {sum(map(len, HOOKS.values()))} hooks changed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
