"""Small scenes on the ranks of an engine with several pools, in which rank 1 has less room than rank 0."""

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName

from tests.sglang.engine import KVCOORD, STOCK, Engine, Groups
from tests.sglang.world import Result, run_ranks

FIRST = list(range(1000, 1064))
SECOND = list(range(2000, 2064))

Scene = Callable[[Any, Groups], Any]
"""What one rank does with its engine, and what it came to."""


def on_ranks(
    model: type[Engine], scene: Scene, backend: str | None = KVCOORD, *, pp: bool = False, **options: Any
) -> list[Result]:
    """The scene on both ranks of an engine: two of one stage, or two stages."""

    def on_rank(groups: Groups) -> Any:
        engine = model(groups, backend=backend, **options)
        told = scene(engine, groups)
        engine.cache.sanity_check()
        engine.close()
        return told

    return run_ranks(on_rank, tp=1 if pp else 2, pp=2 if pp else 1, limit_s=15.0 if backend is STOCK else 150.0)


def hold_host(engine: Engine, groups: Groups, pool: str, left: int) -> Any:
    """Something else takes rank 1's host slots of a pool but for `left`."""
    host = engine.host_pools()[pool]
    return host.alloc(host.available_size() - left) if groups.rank == 1 else None


def hold_device(engine: Engine, groups: Groups, pool: str, left: int) -> Any:
    """The same on the device."""
    allocator = engine.device_allocators()[pool]
    free = int(type(allocator).available_size(allocator))
    return engine.take_device(pool, free - left) if groups.rank == 1 else None


def give_back(engine: Engine, pool: str, held: Any) -> None:
    """Ends `hold_host`."""
    if held is not None:
        engine.host.free(held, pool=PoolName(pool))


def host_free(engine: Engine) -> dict[str, int]:
    """Free host slots of each pool of this rank."""
    return {pool: host.available_size() for pool, host in engine.host_pools().items()}
