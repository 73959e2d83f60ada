"""A replay's report for people: one table, the verdicts that must hold marked."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvcoord.load.report import ReplayReport


def table(report: ReplayReport) -> Table:
    """Two columns, for a rich console."""
    shown = Table(title=_title(report), show_header=False, title_justify="left")
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in _rows(report):
        shown.add_row(name, value)
    return shown


def _title(report: ReplayReport) -> str:
    shape = f" (tp {report.tp} x pp {report.pp})" if report.pp > 1 else ""
    return f"{Path(report.trace).name}: {report.ranks} ranks{shape}, lag {report.lag}, agreement {report.agreement}"


def _rows(report: ReplayReport) -> list[tuple[str, str | Text]]:
    return [
        ("requests", f"{report.requests:,}" + (f" ({report.skipped:,} skipped)" if report.skipped else "")),
        ("pages", f"{report.pages_total:,}"),
        *[(f"pages hit on {tier}", _part(pages, report)) for tier, pages in report.pages_hit_by_tier.items()],
        ("pages hit", _part(report.pages_hit, report)),
        ("pages loaded back", f"{report.pages_loaded:,}"),
        ("pages evicted", ", ".join(f"{pages:,} from {tier}" for tier, pages in report.pages_evicted.items())),
        ("pages on the host", _by_rank(report.host_pages_here)),
        ("pages copied there", _by_rank(report.pages_to_host)),
        ("commits", f"{report.commits:,}"),
        ("aborts", _aborts(report)),
        ("decisions", f"{report.covered:,} covered, {report.voted:,} voted, {report.immediate:,} immediate"),
        ("bytes moved", f"{_size(report.bytes_moved)}, {_size(report.bytes_moved_per_s)}/s"),
        (
            "engine thread a step",
            f"p50 {report.step_us_p50:,.0f} us, p99 {report.step_us_p99:,.0f} us "
            f"({report.advance_share:.0%} until advance was answered)",
        ),
        ("pages verified", f"{report.pages_verified:,}"),
        ("pages corrupt", _verdict(f"{report.pages_corrupt:,}", report.pages_corrupt)),
        ("pages leaked", _verdict(f"{report.pages_leaked:,}", report.pages_leaked)),
        ("digests equal", _verdict("yes" if report.digests_equal else "no", not report.digests_equal)),
        *_trouble(report),
        *_outage(report),
        ("seconds", f"{report.seconds:.2f}"),
    ]


def _part(pages: int, report: ReplayReport) -> str:
    return f"{pages:,} ({pages / report.pages_total:.1%})"


def _by_rank(pages: list[int]) -> str:
    return ", ".join(f"{count:,}" for count in pages) + " by rank"


def _aborts(report: ReplayReport) -> str:
    """One line for each reason, with the first one's rank and shortfall."""
    if not report.aborts:
        return "none"
    lines = []
    for reason, count in report.aborts.items():
        first = report.aborts_first.get(reason)
        lines.append(f"{reason} {count:,}" + (f"; the first: {first}" if first is not None else ""))
    return "\n".join(lines)


def _trouble(report: ReplayReport) -> list[tuple[str, str | Text]]:
    rows: list[tuple[str, str | Text]] = []
    if report.retractions:
        rows.append(("retractions", ", ".join(f"{reason} {count:,}" for reason, count in report.retractions.items())))
    for leak in report.leaks:
        held = f"{leak.reserved} reserved, {leak.quarantined} quarantined, {leak.stray} stray"
        rows.append((f"leaked on rank {leak.rank}", Text(f"{leak.tier}.{leak.pool}: {held}", "red")))
    found = report.divergence
    if found is not None:
        sides = " against ".join("ranks " + ",".join(map(str, side)) for side in found.sides)
        what = found.operation or "no longer recorded"
        rows.append(("first divergence", Text(f"round {found.round}: {sides}; {what}", "red")))
    elif not report.digests_equal:
        rows.append(("differences", Text("\n".join(report.differences), "red")))
    return rows


def _outage(report: ReplayReport) -> list[tuple[str, str | Text]]:
    if not report.coordinators_lost:
        return []
    return [
        ("coordinators lost", f"{report.coordinators_lost}; the longest step took {report.step_us_max / 1e6:.3f} s")
    ]


def _verdict(text: str, wrong: bool | int) -> Text:
    return Text(text, "red" if wrong else "green")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
