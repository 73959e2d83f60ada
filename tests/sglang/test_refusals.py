"""What is not supported is refused at start, with a sentence; what SGLang changed is named."""

import sysconfig
import types
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.registry import registered_radix_cache_backends

from kvcoord.errors import UsageError
from kvcoord.integrations.sglang import contract, support
from kvcoord.integrations.sglang.plugin import BACKEND, register
from tests.sglang.engine import Engine, Groups
from tests.sglang.world import run_ranks, values


def test_the_backend_is_registered_under_its_name() -> None:
    assert BACKEND in registered_radix_cache_backends()


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    (installed,) = distributions(name="kvcoord", path=[sysconfig.get_path("purelib")])
    (entry,) = installed.entry_points.select(group="sglang.srt.plugins")
    assert (entry.name, entry.load()) == (BACKEND, register)


def test_the_installed_sglang_is_the_one_that_the_integration_was_written_against() -> None:
    contract.check_contract()


def test_another_release_is_refused_with_those_that_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_installed_version", lambda: "0.5.24")
    with pytest.raises(UsageError, match=r"0\.5\.24.*supports SGLang 0\.5\.23"):
        contract.check_contract()


def changed_source(old: str, new: str) -> list[str]:
    """What the contract says of an installation in which one text differs."""

    def read(file: str) -> str | None:
        text = contract.read_installed(file)
        return None if text is None else text.replace(old, new)

    return contract.changes(contract._recorded(), read)


def test_a_hook_that_is_gone_is_named() -> None:
    (line, *_) = changed_source("def loading_check(", "def check_loading(")
    assert "UnifiedRadixCache.loading_check is not there any more" in line


def test_a_hook_with_another_signature_is_named_with_both() -> None:
    found = changed_source("def flush_pending_backups(self)", "def flush_pending_backups(self, force)")
    assert any("flush_pending_backups was (self) and is (self, force)" in line for line in found)


def test_a_hook_with_another_body_is_named() -> None:
    found = changed_source("self._drain_async_work()", "self._drain_async_works()")
    assert any("check_hicache_events has another body" in line for line in found)


def test_a_file_that_is_gone_is_named() -> None:
    (line, *_) = contract.changes(contract._recorded(), lambda file: None)
    assert "is not there any more" in line


def test_a_folder_that_holds_the_package_can_be_checked(tmp_path: Path) -> None:
    assert contract.main([str(tmp_path)]) == 1


FLAGS: dict[str, Any] = {
    "disaggregation_mode": "null",
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": False,
}
"""What is looked at in SGLang's arguments, as a plain engine has it."""

CONTEXT: dict[str, Any] = {
    "disable_radix_cache": False,
    "enable_hierarchical_cache": True,
    "is_hybrid_swa": False,
    "full_tokens_per_layer": None,
    "is_hybrid_ssm": False,
}


def context(**values: Any) -> Any:
    """SGLang's build context of a plain engine, but for these values."""
    flags = {name: values.pop(name, value) for name, value in FLAGS.items()}
    return types.SimpleNamespace(server_args=types.SimpleNamespace(**flags), **{**CONTEXT, **values})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"disable_radix_cache": True}, "leaves nothing to agree on"),
        ({"enable_hierarchical_cache": False}, "add --enable-hierarchical-cache"),
        ({"is_hybrid_swa": True, "full_tokens_per_layer": 0}, "no full attention"),
        ({"is_hybrid_swa": True, "is_hybrid_ssm": True}, "mamba with a sliding window"),
        ({"enable_lmcache": True}, "has a cache of its own"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_do(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        support.refuse_before_building(context(**values))


@pytest.mark.parametrize("values", [{}, {"is_hybrid_swa": True}, {"is_hybrid_ssm": True}])
def test_an_engine_that_is_covered_is_not_refused(values: dict[str, Any]) -> None:
    support.refuse_before_building(context(**values))


def test_a_host_pool_whose_slots_hold_tokens_of_several_ranks_is_refused() -> None:
    def on_rank(groups: Groups) -> str:
        engine = Engine(groups)
        engine.host.anchor_entry.host_pool.dcp_size = 2
        with pytest.raises(UsageError) as refused:
            support.refuse_unsupported(engine.cache, None)
        engine.close()
        return str(refused.value)

    (said,) = values(run_ranks(on_rank, tp=1))
    assert "--dcp-size" in said


class SWATokenToKVPoolAllocator:
    """An allocator that counts the window's slots by requests."""

    available_size, swa_req_ring = 0, True


def hybrid_cache(*, window: bool = False, **values: Any) -> Any:
    """What is looked at in a cache with more than full attention, as one that is covered has it, but for these."""
    parts = [types.SimpleNamespace(name=name) for name in ("FULL", "SWA" if window else "MAMBA")]
    slots = type("MambaSlotAllocator", (), {})()
    anchor = types.SimpleNamespace(host_pool=types.SimpleNamespace(shared_allocation_domain=None, dcp_size=1))
    host = types.SimpleNamespace(entries=values.pop("entries", []), anchor_entry=anchor)
    cache = {
        "host_memory_mode": "cache",
        "tree_components": parts,
        "token_to_kv_pool_allocator": types.SimpleNamespace(available_size=0),
        "supports_swa": lambda: window,
        "supports_mamba": lambda: not window,
        "req_to_token_pool": types.SimpleNamespace(mamba_allocator=slots, mamba_ckpt_pool=None),
        "cache_controller": types.SimpleNamespace(is_kv_sharded=False, mem_pool_host=host),
        "sidecar_pool_specs": [],
    }
    return types.SimpleNamespace(**{**cache, **values})


def refuse(cache: Any) -> None:
    support.refuse_unsupported(cache, types.SimpleNamespace(hicache_storage_backend=None))


def host_pool(name: str) -> Any:
    return types.SimpleNamespace(name=PoolName(name))


STATES = types.SimpleNamespace(mamba_allocator=object(), mamba_ckpt_pool=None)
CHECKPOINTS = types.SimpleNamespace(mamba_allocator=type("MambaSlotAllocator", (), {})(), mamba_ckpt_pool=object())


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (hybrid_cache(tree_components=[types.SimpleNamespace(name="C128")]), "C128"),
        (hybrid_cache(window=True), "window's slots are not counted apart"),
        (hybrid_cache(window=True, token_to_kv_pool_allocator=SWATokenToKVPoolAllocator()), "not counted apart"),
        (hybrid_cache(req_to_token_pool=STATES), "states' slots are not counted apart"),
        (hybrid_cache(req_to_token_pool=CHECKPOINTS), "checkpoints have a pool of their own"),
        (hybrid_cache(entries=[host_pool("kv"), host_pool("deepseek_v4_c4")]), "deepseek_v4_c4"),
    ],
)
def test_pools_that_are_not_known_are_refused_by_name(cache: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse(cache)


def test_a_hybrid_cache_that_is_covered_is_not_refused() -> None:
    refuse(hybrid_cache(entries=[host_pool("kv"), host_pool("mamba")]))


def test_ranks_with_different_write_policies_are_refused_by_name() -> None:
    def on_rank(groups: Groups) -> None:
        Engine(groups, write_policy=("write_through", "write_back")[groups.rank])

    errors = [result.error for result in run_ranks(on_rank, environment={"KVCOORD_CONFIG": SHORT})]
    assert any("JoinRefused" in error and "hicache_write_policy" in error for error in errors)


SHORT = str(Path(__file__).with_name("short.yaml"))
"""Limits for a group that never comes together."""
