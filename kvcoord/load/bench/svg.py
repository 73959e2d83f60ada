"""Charts as inline SVG: lines and dots on linear or logarithmic axes, with a legend. No scripts, no fonts to load."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

from kvcoord.load.bench.result import Chart, Line

WIDTH: Final = 760
HEIGHT: Final = 340
LEFT: Final = 78
RIGHT: Final = 16
TOP: Final = 16
BOTTOM: Final = 52
LEGEND_LINE: Final = 20
LEGEND_COLUMNS: Final = 3
LEGEND_LETTERS_MAX: Final = 24
"""Labels up to here stand beside each other."""
TICKS: Final = 6

COLOURS: Final = (
    *("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0a7d8c", "#bf3989", "#57606a"),
    *("#54aeff", "#ff8182", "#4ac26b", "#d4a72c", "#c297ff", "#39c5cf", "#ff80c8", "#afb8c1"),
)


class Axis:
    """Maps values to pixels, and knows its ticks."""

    def __init__(self, values: Sequence[float], low_px: float, high_px: float, *, log: bool) -> None:
        self.log = log
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        if log:
            self._low, self._high = float(floor(log10(low))), float(ceil(log10(high)))
        else:
            self._low, self._high = min(low, 0.0), high
        if self._high <= self._low:
            self._high = self._low + 1.0
        self._low_px, self._per_unit = low_px, (high_px - low_px) / (self._high - self._low)

    def pixel(self, value: float) -> float:
        where = log10(value) if self.log else value
        return self._low_px + (where - self._low) * self._per_unit

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(int(self._low), int(self._high) + 1)
            steps = (1, 2, 5) if len(decades) <= 3 else (1,)
            values = [step * 10.0**decade for decade in decades for step in steps]
            return [value for value in values if log10(value) <= self._high + 1e-9]
        step = _round_step((self._high - self._low) / TICKS)
        first = ceil(self._low / step)
        return [number * step for number in range(first, floor(self._high / step) + 1)]


def colours_of(charts: Sequence[Chart]) -> dict[str, str]:
    """A colour for each label, the same in all of these charts."""
    labels = dict.fromkeys(line.label for chart in charts for line in chart.lines)
    return {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}


def render(chart: Chart, colours: Mapping[str, str]) -> str:
    """One `<svg>` element. `colours` by the label of a line."""
    lines = [Line(line.label, _drawable(line, chart), line.dots) for line in chart.lines]
    points = [point for line in lines for point in line.points]
    columns = LEGEND_COLUMNS if all(len(line.label) <= LEGEND_LETTERS_MAX for line in lines) else 1
    height = HEIGHT + LEGEND_LINE * ceil(len(lines) / columns)
    x_axis = Axis([x for x, _ in points], LEFT, WIDTH - RIGHT, log=chart.x_log)
    y_axis = Axis([y for _, y in points], HEIGHT - BOTTOM, TOP, log=chart.y_log)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
        f' xmlns="http://www.w3.org/2000/svg"><title>{escape(chart.title)}</title>',
        *_x_grid(x_axis, chart.x_label),
        *_y_grid(y_axis, chart.y_label),
    ]
    for number, line in enumerate(lines):
        parts += _line(line, colours[line.label], x_axis.pixel, y_axis.pixel)
        parts += _legend(line.label, number, columns, colours[line.label])
    return "".join([*parts, "</svg>"])


def number_text(value: float) -> str:
    """A number as people read it: 0.05, 1.5, 250, 12k, 3M."""
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / divisor:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _drawable(line: Line, chart: Chart) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.points if (x > 0 or not chart.x_log) and (y > 0 or not chart.y_log)]


def _round_step(rough: float) -> float:
    magnitude = 10.0 ** floor(log10(rough))
    return next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= rough * 0.999)


def _x_grid(axis: Axis, label: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, label, "middle", "axis")]
    for value in axis.ticks():
        x = axis.pixel(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 18, number_text(value), "middle", "tick"))
    return parts


def _y_grid(axis: Axis, label: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 16 {middle:.0f})"'
    parts = [f'<text class="axis" x="16" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(label)}</text>']
    for value in axis.ticks():
        y = axis.pixel(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, number_text(value), "end", "tick"))
    return parts


def _line(line: Line, colour: str, x_pixel: Callable[[float], float], y_pixel: Callable[[float], float]) -> list[str]:
    places = [(x_pixel(x), y_pixel(y)) for x, y in line.points]
    radius = 1.6 if line.dots else 2.6
    marked = line.dots or len(places) <= 20
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in places if marked]
    if not line.dots and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return parts


def _legend(label: str, number: int, columns: int, colour: str) -> list[str]:
    row, column = divmod(number, columns)
    x = LEFT + column * (WIDTH - LEFT - RIGHT) // columns
    y = HEIGHT + LEGEND_LINE * row + 4
    mark = f'<rect x="{x}" y="{y - 9}" width="14" height="10" rx="2" fill="{colour}"/>'
    return [mark, _text(x + 22, y, label, "start", "tick")]


def _text(x: float, y: float, text: str, anchor: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
