"""Ranks that differ, in whole groups with real sockets and copies."""

import asyncio
import os
from pathlib import Path

import pytest

from kvcoord.config import WorkerConfig
from kvcoord.config.group import GroupConfig
from kvcoord.domain import DivergencePolicy
from kvcoord.errors import ConfigError, GroupRenewed, KvcoordError
from kvcoord.runtime.member import Member
from tests.runtime.engine import KEYS, Engine, on_all
from tests.runtime.groups import group


async def told(engine: Engine) -> KvcoordError:
    """What an engine hears, sooner or later, while it goes on."""
    try:
        while True:
            await engine.advance()
    except KvcoordError as error:
        return error


async def test_a_group_that_resyncs_drops_its_cache_and_serves_its_engines_again(tmp_path: Path) -> None:
    async with (
        group(tmp_path, world_size=2, divergence="resync") as made,
        Engine(made.address(0)) as one,
        Engine(made.address(1)) as other,
    ):
        engines = [one, other]
        await on_all(*(engine.advance() for engine in engines))
        await on_all(*(engine.store(KEYS, b"a") for engine in engines))
        await on_all(*(engine.settle() for engine in engines))
        made.workers[1].machine.cache.state.digest.apply("only here")
        errors = await asyncio.wait_for(on_all(*(told(engine) for engine in engines)), 30)
        for error in errors:
            assert isinstance(error, GroupRenewed)
            assert "nothing (ranks 0) against only here (ranks 1)" in error.cause
        for engine in engines:
            await engine.cache.register()
            engine.step = 0
        await on_all(*(engine.advance() for engine in engines))
        assert [match.host_pages for match in await on_all(*(e.cache.match(KEYS) for e in engines))] == [0, 0]
        await on_all(*(engine.store(KEYS, b"b") for engine in engines))
        await on_all(*(engine.settle() for engine in engines))
        assert await on_all(*(engine.read(KEYS) for engine in engines)) == [{b"b" * 64}] * 2
        assert [worker.snapshot().divergences for worker in made.workers] == [1, 1]
    assert len([name for name in os.listdir(tmp_path) if name.startswith("rank")]) == 2


def test_a_member_without_a_sidecar_has_no_cache_to_drop() -> None:
    config = WorkerConfig(rank=0, group=GroupConfig(world_size=2, divergence=DivergencePolicy.RESYNC))
    with pytest.raises(ConfigError, match=r"group\.divergence='resync': .*use stop or warn"):
        Member(config, {}, events=list)
