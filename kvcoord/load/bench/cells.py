"""Rows of any benchmark as a table for people: which columns, and how each value reads."""

from collections.abc import Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from kvcoord.load.bench.result import LatencyRow, Result

Value = str | int | float | bool | None

MET = "met"


def columns(rows: Sequence[msgspec.Struct]) -> dict[str, list[Value]]:
    """The values of all rows by heading, without columns that have no value."""
    shown: dict[str, list[Value]] = {}
    for row in rows:
        for name, value in _fields(row).items():
            shown.setdefault(name.replace("_", " "), []).append(value)
    return {name: values for name, values in shown.items() if any(value not in (None, "") for value in values)}


def cell(value: Value) -> str:
    """A value as people read it: three digits that count."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return value


def is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def table(result: Result) -> Table:
    """For a rich console."""
    shown = Table(title=result.title, title_justify="left")
    by_heading = columns(result.rows)
    for name, values in by_heading.items():
        shown.add_column(name, justify="right" if any(map(is_number, values)) else "left", overflow="fold")
    for row in zip(*by_heading.values(), strict=True):
        shown.add_row(*(_styled(value, name) for name, value in zip(by_heading, row, strict=True)))
    return shown


def _fields(row: msgspec.Struct) -> dict[str, Value]:
    """One row. The quantiles of a latency share a column: they are read together."""
    if not isinstance(row, LatencyRow):
        return msgspec.structs.asdict(row)
    return {
        "case": row.case,
        "ranks": row.ranks,
        "p50 / p90 / p99 / max us": _together(row.p50_us, row.p90_us, row.p99_us, row.max_us),
        "peer": row.peer,
        "peer's p50 / p90 / p99 / max us": _together(
            row.peer_p50_us, row.peer_p90_us, row.peer_p99_us, row.peer_max_us
        ),
        "ratio p50": row.ratio_p50,
        "ratio p99": row.ratio_p99,
        "budget": row.budget,
        MET: row.met,
    }


def _together(*micros: float) -> str:
    return " / ".join(map(cell, micros))


def _styled(value: Value, name: str) -> str | Text:
    if name == MET and value is not None:
        return Text("met", "green") if value else Text("not met", "red")
    return cell(value)
