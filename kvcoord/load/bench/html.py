"""A report of benchmarks as one self-contained HTML file: what ran where, tables, charts. No scripts, no network."""

from collections.abc import Sequence
from html import escape
from typing import Final

from kvcoord.load.bench import svg
from kvcoord.load.bench.cells import MET, Value, cell, columns, is_number
from kvcoord.load.bench.result import Result

STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1320px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: 0; } h2 { margin-top: 2.6rem; border-bottom: 1px solid #d0d7de; }
h3 { font-size: 1rem; margin: 1.4rem 0 0.2rem; }
p.where, li { color: #57606a; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th { text-align: left; background: #f6f8fa; }
th, td { padding: 3px 8px; border-bottom: 1px solid #eaeef2; vertical-align: top; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.met, td.unmet { font-weight: 600; white-space: nowrap; } td.met { color: #1a7f37; } td.unmet { color: #d1242f; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(520px, 1fr)); gap: 0 1.2rem; }
svg { width: 100%; height: auto; } svg .grid { stroke: #eaeef2; stroke-width: 1; }
svg .axis { font: 13px system-ui, sans-serif; fill: #1f2328; }
svg .tick { font: 12px system-ui, sans-serif; fill: #57606a; }
"""


def page(results: Sequence[Result], where: str, when: str) -> str:
    """The whole file."""
    sections = "".join(_section(result) for result in results)
    contents = "".join(f'<li><a href="#{result.name}">{escape(result.title)}</a></li>' for result in results)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvcoord benchmarks</title>'
        f"<style>{STYLE}</style></head><body><h1>kvcoord benchmarks</h1>"
        f'<p class="where">{escape(when)} on {escape(where)}.<br>Every peer ran in the same run, in turn with'
        " kvcoord. A ratio is kvcoord's time over the peer's (below 1 is faster), or of rates the other way round.</p>"
        f"<ul>{contents}</ul>{sections}</body></html>\n"
    )


def _section(result: Result) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    colours = svg.colours_of(result.charts)
    charts = "".join(
        f"<div><h3>{escape(chart.title)}</h3>{svg.render(chart, colours)}</div>" for chart in result.charts
    )
    return (
        f'<h2 id="{result.name}">{escape(result.title)}</h2>'
        f'<div class="scroll">{_table(result)}</div><ul>{notes}</ul><div class="charts">{charts}</div>'
    )


def _table(result: Result) -> str:
    by_heading = columns(result.rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in by_heading)
    rows = zip(*by_heading.values(), strict=True)
    cells = ("".join(_cell(value, name) for name, value in zip(by_heading, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Value, name: str) -> str:
    if name == MET and value is not None:
        return '<td class="met">met</td>' if value else '<td class="unmet">not met</td>'
    style = ' class="number"' if is_number(value) else ""
    return f"<td{style}>{escape(cell(value))}</td>"
