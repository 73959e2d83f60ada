"""The coordinator is killed or stopped in the middle of a replay of 4 ranks: nothing tells it afterwards."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcoord.config import Timeouts
from kvcoord.load.plan import ReplayOptions, ReplayPlan, plan_replay
from kvcoord.load.replay import replay
from kvcoord.load.report import ReplayReport
from kvcoord.runtime.children import Child
from kvcoord.runtime.exits import Exit
from kvcoord.runtime.process import Ready
from tests.runtime.process_group import PATIENT

RANKS = 4
REQUESTS = 240

NOTICING = msgspec.structs.replace(PATIENT, heartbeat_timeout_s=4.0, gather_timeout_s=1.5)
"""Silence is noticed, after some seconds: a rank that the machine has not let run for a moment is not lost."""

Act = Callable[["Processes"], None]


class Processes:
    """The processes of a replay, by name."""

    def __init__(self) -> None:
        self.ready: list[Child] = []
        self._killed: list[Child] = []

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the present life of that process."""
        child = self._present(name)
        child.signal(number)
        if number is signal.SIGKILL:
            self._killed.append(child)

    def serves(self, name: str) -> bool:
        return self._present(name) not in self._killed

    def _present(self, name: str) -> Child:
        return [child for child in self.ready if child.name == name][-1]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    seen = Processes()
    ready = Child.ready

    async def recording(self: Child, *args: Any, **kwargs: Any) -> Ready:
        told = await ready(self, *args, **kwargs)
        seen.ready.append(self)
        return told

    monkeypatch.setattr(Child, "ready", recording)
    return seen


def planned(timeouts: Timeouts = PATIENT, **options: Any) -> ReplayPlan:
    """A replay whose steps begin up to 20 ms late on one rank, so that there is time for something to happen."""
    plan = plan_replay(ReplayOptions(ranks=RANKS, requests_max=REQUESTS, jitter_s={1: 0.02}, **options))
    return msgspec.structs.replace(plan, timeouts=timeouts)


async def played(processes: Processes, acts: dict[int, Act], **options: Any) -> ReplayReport:
    """Plays it; `acts` are done once so many requests are served, each to a coordinator that serves."""
    waiting = dict(acts)

    def on_progress(requests: int) -> None:
        due = min(waiting, default=requests + 1)
        if requests >= due and processes.serves("coordinator"):
            waiting.pop(due)(processes)

    report = await replay(planned(**options), on_progress)
    assert not waiting
    return report


@pytest.fixture(scope="module")
def undisturbed() -> ReplayReport:
    """The same replay with nothing happening."""
    with asyncio.Runner() as runner:
        return runner.run(replay(planned()))


def unchanged(found: ReplayReport, expected: ReplayReport) -> bool:
    """Whether requests, hits and cached pages are the same, every page was right and nothing leaked."""
    assert found.exit_code is Exit.OK, found.differences
    for name in ("requests", "skipped", "pages_total", "pages_hit", "pages_hit_by_tier", "pages_evicted"):
        assert getattr(found, name) == getattr(expected, name), name
    return found.pages_corrupt == 0


def kill(processes: Processes) -> None:
    processes.signal("coordinator", signal.SIGKILL)


def stop(processes: Processes) -> None:
    processes.signal("coordinator", signal.SIGSTOP)


def carry_on(processes: Processes) -> None:
    processes.signal("coordinator", signal.SIGCONT)


@pytest.mark.parametrize("options", [{"restart": True}, {"standby": True}], ids=["restart", "standby"])
async def test_a_killed_coordinator_costs_no_page_and_no_hit(
    options: dict[str, bool], processes: Processes, undisturbed: ReplayReport
) -> None:
    found = await played(processes, {80: kill}, **options)
    assert unchanged(found, undisturbed)
    assert found.coordinators_lost == 1


async def test_a_coordinator_killed_again_and_again_costs_no_page_and_no_hit(
    processes: Processes, undisturbed: ReplayReport
) -> None:
    found = await played(processes, {30: kill, 70: kill, 110: kill}, restart=True)
    assert unchanged(found, undisturbed)
    assert found.coordinators_lost == 3


async def test_a_stopped_coordinator_gives_way_to_the_standby_and_changes_nothing_when_it_goes_on(
    processes: Processes, undisturbed: ReplayReport
) -> None:
    found = await played(processes, {80: stop, 120: carry_on}, timeouts=NOTICING, standby=True)
    assert unchanged(found, undisturbed)
    assert found.coordinators_lost == 0


async def test_a_replay_whose_only_coordinator_is_killed_ends_with_its_name(processes: Processes) -> None:
    with pytest.raises(Exception, match="coordinator: was killed by SIGKILL"):
        await played(processes, {40: kill})
