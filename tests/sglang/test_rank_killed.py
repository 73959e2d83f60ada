"""One rank's process dies, or is stopped, in the middle of a stream: every other scheduler thread hears of it.

The limits are those of the configuration; the tests only see to it that nobody waits for ever.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcoord.errors import GroupLost
from tests.sglang.engine import Engine, Groups
from tests.sglang.storage_stream import StorageStream
from tests.sglang.stored import OPTIONS, PAGE
from tests.sglang.stream import Faults
from tests.sglang.world import Result, run_ranks, values

STEPS = 60
_FORK = multiprocessing.get_context("fork")

Told = tuple[str, str]
"""The name of an error's type, and what it says."""


@pytest.fixture
def limits(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "kvcoord.yaml"
    file.write_text("timeouts:\n  heartbeat_interval_s: 0.2\n  heartbeat_timeout_s: 4\n  group_deadline_s: 1.5\n")
    return {"KVCOORD_CONFIG": str(file)}


def ending(call: Callable[[], object]) -> Told:
    """The error that a call ends with."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "went on"


def struck(
    victim: int,
    blow: Callable[[], object],
    limits: dict[str, str],
    *,
    tp: int = 2,
    at_end: Callable[[int], object] = lambda rank: None,
    silent: int | None = None,
    store: Path | None = None,
) -> list[Result]:
    """A stream on every rank; `blow` falls on `victim` after some steps. The others tell, twice, how theirs ended.

    `store`: a folder that is attached as storage, whose threads wait for each other in collectives.
    """
    storage = {"page_size": PAGE, "storage": "file", "storage_options": OPTIONS, "file_storage_path": str(store)}

    def on_rank(groups: Groups) -> Any:
        engine = Engine(groups, **(storage if store else {}))
        stream = StorageStream(engine, 11, groups.rank, Faults(copy_steps=4))
        stream.go_on(STEPS)
        if groups.rank == victim:
            blow()
        told = ending(lambda: stream.go_on(STEPS)), ending(engine.step)
        at_end(groups.rank)
        engine.close()
        return told

    return run_ranks(on_rank, tp=tp, environment=limits, silent=silent)


def check(told: tuple[Told, Told], victim: int) -> None:
    first, again = told
    assert first[0] == GroupLost.__name__
    assert f"rank {victim}" in first[1]
    assert again == first


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 1], ids=["with the coordinator", "without the coordinator"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_survivor_raises_one_error_that_names_the_rank_and_the_cause(
    tp: int, victim: int, blow: int, limits: dict[str, str]
) -> None:
    results = struck(victim, lambda: os.kill(os.getpid(), blow), limits, tp=tp, silent=victim)
    for told in values(results[:victim] + results[victim + 1 :]):
        check(told, victim)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_lost_while_pages_are_fetched_ends_the_other_and_its_storage(
    blow: int, limits: dict[str, str], tmp_path: Path
) -> None:
    results = struck(1, lambda: os.kill(os.getpid(), blow), limits, silent=1, store=tmp_path)
    (told,) = values(results[:1])
    check(told, 1)


@pytest.mark.parametrize("victim", [0, 1], ids=["with the coordinator", "without the coordinator"])
def test_a_rank_that_goes_on_after_the_others_gave_it_up_raises_as_well(victim: int, limits: dict[str, str]) -> None:
    stopped = _FORK.Value("i", 0)

    def stop() -> None:
        stopped.value = os.getpid()
        os.kill(stopped.value, signal.SIGSTOP)

    def wake(rank: int) -> None:
        if rank != victim:
            os.kill(stopped.value, signal.SIGCONT)

    told = values(struck(victim, stop, limits, at_end=wake))
    check(told[1 - victim], victim)
    assert told[victim][0][0] == GroupLost.__name__
