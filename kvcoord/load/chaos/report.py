"""What a run under chaos has shown, for people and as JSON."""

from collections.abc import Sequence
from statistics import median

import msgspec
from rich.table import Table
from rich.text import Text

from kvcoord.load.chaos.faults import FaultKind
from kvcoord.load.chaos.memory import Growth


class FaultRow(msgspec.Struct, frozen=True):
    """Faults of one kind, and how long it took from the end of each until all engines had gone on."""

    kind: FaultKind
    faults: int
    recovered: int
    median_s: float
    max_s: float


class ChaosSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `violations` is empty when every promise was kept. Pages are added up over the ranks.

    `step_max_s`: the longest that an engine's thread was blocked in one step that ended. `lives_ended`: how engines
    heard that they have to begin anew, by error.
    """

    seed: int
    ranks: int
    seconds: float
    faults: list[FaultRow]
    requests: int
    pages_verified: int
    pages_corrupt: int
    step_max_s: float
    lives_ended: dict[str, int]
    memory: dict[str, Growth]
    violations: list[str]


def fault_rows(recoveries: Sequence[tuple[FaultKind, float | None]]) -> list[FaultRow]:
    """One row for each kind; None: it was not waited for, since the next fault came first."""
    rows = []
    for kind in FaultKind:
        times = [seconds for found, seconds in recoveries if found is kind]
        known = [seconds for seconds in times if seconds is not None]
        if times:
            rows.append(
                FaultRow(kind, len(times), len(known), median(known) if known else 0.0, max(known, default=0.0))
            )
    return rows


def _memory(kind: str, grown: Growth) -> str:
    settled, growth = grown.settled_bytes_max / 2**20, grown.growth_bytes_max / 2**20
    return f"{kind}: {settled:.0f} MiB, in {grown.lives} long lives grown by {growth:.1f} MiB at most"


def table(summary: ChaosSummary) -> list[Table | Text]:
    """For a rich console."""
    faults = Table(title=f"seed {summary.seed}, {summary.ranks} ranks, {summary.seconds:.0f} s", title_justify="left")
    for column in ("fault", "times", "waited for", "median s", "max s"):
        faults.add_column(column, justify="left" if column == "fault" else "right")
    for row in summary.faults:
        faults.add_row(row.kind, str(row.faults), str(row.recovered), f"{row.median_s:.2f}", f"{row.max_s:.2f}")
    faults.add_section()
    faults.add_row("all", str(sum(row.faults for row in summary.faults)), "", "", "")
    ended = ", ".join(f"{name} {times}" for name, times in sorted(summary.lives_ended.items())) or "none"
    lines = [
        f"requests {summary.requests:,}, pages verified {summary.pages_verified:,}, corrupt {summary.pages_corrupt:,}",
        f"longest step {summary.step_max_s:.2f} s; engines began anew after: {ended}",
        *(_memory(kind, grown) for kind, grown in summary.memory.items()),
    ]
    texts = [Text(line) for line in lines]
    texts += [Text(f"VIOLATION {violation}", "red") for violation in summary.violations]
    texts.append(Text("all promises kept", "green") if not summary.violations else Text("promises broken", "red"))
    return [faults, *texts]
