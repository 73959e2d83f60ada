"""Rows of any benchmark as a table for people: which columns, and how each value reads."""

from collections.abc import Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from kvcoord.load.bench.result import Result


def headings(rows: Sequence[msgspec.Struct]) -> list[str]:
    """The fields of the rows, without those that no row has a value for."""
    if not rows:
        return []
    return [name for name in rows[0].__struct_fields__ if any(getattr(row, name) not in (None, "") for row in rows)]


def cell(value: object) -> str:
    """A value as people read it: three digits that count."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def table(result: Result) -> Table:
    """For a rich console."""
    shown = Table(title=result.title, title_justify="left")
    names = headings(result.rows)
    for name in names:
        numeric = any(isinstance(getattr(row, name), int | float) for row in result.rows)
        shown.add_column(
            name.replace("_", " "), justify="right" if numeric and name != "met" else "left", overflow="fold"
        )
    for row in result.rows:
        shown.add_row(*(_styled(getattr(row, name), name) for name in names))
    return shown


def _styled(value: object, name: str) -> str | Text:
    if name == "met" and value is not None:
        return Text("met", "green") if value else Text("not met", "red")
    return cell(value)
