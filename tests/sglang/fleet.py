"""One random stream of requests on every rank of an engine, and whether the ranks came to the same."""

import os
from typing import Any, Final

from tests.sglang.engine import STOCK, Engine, Groups
from tests.sglang.stream import Faults, Report, Stream
from tests.sglang.world import run_ranks, values

STEPS: Final = 300
SEEDS: Final = int(os.environ.get("STREAM_SEEDS", "3"))
"""Seeds of each case. More of them are for a night, not for every change."""

NONE: Final = Faults()
HOST: Final = Faults(host_noise=160)
ALL: Final = Faults(host_noise=160, device_noise=60, copy_steps=6)


def play(
    seed: int,
    backend: str | None,
    faults: Faults,
    *,
    model: type[Engine] = Engine,
    tp: int = 2,
    pp: int = 1,
    unequal: int = 0,
    **options: Any,
) -> list[Report]:
    """One stream. `unequal`: so many host slots fewer for each rank after the first."""

    def on_rank(groups: Groups) -> Report:
        first = groups.rank == 0
        own = Faults(faults.host_noise, 0 if first else faults.device_noise, faults.copy_steps, faults.keeps_promises)
        engine = model(
            groups,
            backend=backend,
            device_slots=256 + own.device_noise,
            host_slots=448 - unequal * groups.rank,
            **options,
        )
        report = Stream(engine, seed, groups.rank, own).play(STEPS)
        engine.close()
        return report

    results = run_ranks(on_rank, tp=tp, pp=pp, limit_s=50.0 if backend is STOCK else 150.0)
    if backend is STOCK:
        return [result.value for result in results if result.ok]
    reports: list[Report] = values(results)
    return reports


def check(reports: list[Report]) -> None:
    """The ranks took the same decisions, loaded the right bytes, and left nothing over."""
    for report in reports:
        assert report.steps == reports[0].steps
        assert report.wrong_bytes == 0
        assert report.leaks == []
    assert reports[0].loads > 0


def part(model: type[Engine], faults: Faults, seeds: int = 3, **options: Any) -> int:
    """On how many of some seeds do stock ranks part?"""
    parted = 0
    for seed in range(seeds):
        reports = play(seed, STOCK, faults, model=model, **options)
        parted += len(reports) < 2 or reports[0].steps != reports[1].steps
    return parted
