"""The production machines under seeded faults: fresh seeds each time, and every seed that ever failed."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcoord.simulation.campaign import broken_by, campaign, make_world, shrink
from kvcoord.simulation.faults import FaultKind
from kvcoord.simulation.shape import Options
from kvcoord.simulation.variant import applied
from kvcoord.simulation.variants import VARIANTS

REPOSITORY = Path(__file__).resolve().parents[2]

FRESH_SEEDS = 200
BATCHES = 20

FIRST_KINDS = tuple(kind.value for kind in FaultKind if kind is not FaultKind.HANG_COPIES)
"""What there was when the seeds below were found: another list would draw other faults for them."""

HARD = Options(
    ranks=3,
    faults=25,
    fault_kinds=(
        "crash_coordinator",
        "crash_rank",
        "restart_engine",
        "cut_up",
        "cut_down",
        "pause_rank",
        "pause_coordinator",
        "hold_copies",
        "delay",
        "reorder",
        "fail_copies",
        "isolate",
    ),
)
"""One fault after another."""


def then(**options: Any) -> Options:
    return Options(fault_kinds=FIRST_KINDS, **options)


FAILED_ONCE = [
    (HARD, 10398, "every recovery gave more verdicts to a rank whose engine stood still"),
    (HARD, 7120, "calls from before a renewal were taken in the new history"),
    (then(ranks=2, steps=20, fault_s=8.0), 405135159, "an abort for a lost rank did not name it"),
    (then(ranks=2), 34, "a suspended rank aborted what the others committed without it"),
    (then(ranks=4), 400, "a suspended rank aborted for another reason than the group"),
    (then(ranks=2), 90, "calls of the next engine were taken by a machine that had left"),
    (then(ranks=4), 356, "a lease that shares a failed load-back was not told"),
    (then(ranks=4, lockstep=False), 90, "entries of a new history went into the old cache"),
    (then(ranks=4), 510, "a vote that came late opened a decided operation again"),
    (then(ranks=4), 115, "slots of a page that two had loaded were freed under a lease"),
    (then(ranks=4), 1213, "calls from before a renewal were taken in the new history"),
    (then(ranks=4), 1247, "an abort for a lost rank did not name it"),
    (then(ranks=4), 1207, "entries of a new history went into the old cache"),
    (then(ranks=4, lockstep=False), 112, "a late vote of the engine's own was applied twice"),
    (then(ranks=4, steps=20, fault_s=8.0), 965936301, "answers reached the engine after the one that had asked"),
    (then(ranks=4, steps=20, fault_s=8.0), 230400028, "a world ended while what is kept was being agreed"),
    (Options(ranks=4, steps=20, fault_s=8.0), 700000549, "engines that were renewed late had no time to come to rest"),
]
"""(options, seed, what was found)."""


def report_of(options: Options, seeds: range) -> str:
    """What was broken, with the story of the first; empty when nothing was."""
    report = campaign(options, seeds)
    assert report.operations > 0
    lines = [f"seed {found.seed}: {found.promise}: {found.detail} with {found.faults}" for found in report.violations]
    return "\n".join([*lines, *(report.violations[0].story[-40:] if report.violations else [])])


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_promise_breaks_under_fresh_seeds(batch: int) -> None:
    base = int(os.environ.get("KVCOORD_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"KVCOORD_SEED={base} repeats this")
    count = FRESH_SEEDS // BATCHES
    options = Options(ranks=(2, 3, 4, 4)[batch % 4], steps=20, fault_s=8.0)
    first = base + batch * count
    assert report_of(options, range(first, first + count)) == ""


@pytest.mark.parametrize("seed", [0, 20])
def test_no_promise_breaks_where_one_fault_follows_the_other(seed: int) -> None:
    assert report_of(HARD, range(seed, seed + 20)) == ""


@pytest.mark.parametrize("seed", range(4))
def test_no_promise_breaks_with_eight_ranks_in_two_stages(seed: int) -> None:
    options = Options(ranks=8, tp=4, pp=2, lag=2, lockstep=True, steps=16, fault_s=6.0)
    assert report_of(options, range(seed, seed + 1)) == ""


@pytest.mark.parametrize("batch", range(4))
def test_no_promise_breaks_where_ranks_keep_host_pages_for_each_other(batch: int) -> None:
    base = int(os.environ.get("KVCOORD_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"KVCOORD_SEED={base} repeats this")
    options = Options(ranks=(2, 3, 4, 8)[batch], replicated=True, steps=20, fault_s=8.0)
    count = (15, 15, 10, 3)[batch]
    assert report_of(options, range(base, base + count)) == ""


@pytest.mark.parametrize(("options", "seed", "found"), FAILED_ONCE, ids=lambda value: str(value)[:60])
def test_a_seed_that_once_failed_keeps_every_promise(options: Options, seed: int, found: str) -> None:
    violation = broken_by(make_world(msgspec.structs.replace(options, hybrid=False, replicated=False), seed))
    assert violation is None, f"again: {found}: {violation}"


def test_worlds_have_faults_recoveries_and_all_promises_looked_at() -> None:
    report = campaign(Options(ranks=3, steps=16, fault_s=6.0), range(16))
    assert report.violations == []
    assert report.recoveries > 3
    assert len(report.faults) > 8
    assert all(count > 0 for count in report.promises.values()), report.promises
    assert len(report.promises) == 10


@pytest.mark.parametrize("lockstep", [True, False])
def test_one_seed_gives_one_story_in_every_process(lockstep: bool) -> None:
    code = (
        "from kvcoord.simulation.campaign import *\n"
        f"world = make_world(Options(ranks=3, lockstep={lockstep}, faults=8, steps=12, fault_s=5.0), 7)\n"
        "print(broken_by(world), world.steps, world.story.digest())\n"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert told[0].startswith("None ")


def test_a_finding_is_told_with_the_fewest_faults_that_show_it() -> None:
    variant = next(variant for variant in VARIANTS if variant.name == "nobody_blamed")
    with applied(variant):
        for seed in range(60):
            world = make_world(Options(ranks=3, faults=8, steps=12, fault_s=6.0), seed)
            violation = broken_by(world)
            if violation is not None and len(world.faults) > 4:
                break
        else:
            pytest.fail("no seed shows the variant")
        finding = shrink(Options(ranks=3, faults=8, steps=12, fault_s=6.0), world, violation)
    assert finding.promise == violation.promise
    assert len(finding.faults) < len(world.faults)
    assert any(finding.operation in line for line in finding.story)
