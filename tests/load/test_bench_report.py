"""Charts and the HTML report: well-formed, complete, and without anything to load."""

import re
from xml.etree import ElementTree

import pytest

from kvcoord.load.bench.html import page
from kvcoord.load.bench.result import Budget, Chart, Line, Result, Series, compare
from kvcoord.load.bench.svg import Axis, colours_of, number_text, render

SVG = "{http://www.w3.org/2000/svg}"


def chart(**fields: object) -> Chart:
    lines = [Line("kvcoord", [(1.0, 5.0), (10.0, 50.0)]), Line("peer <1>", [(1.0, 0.0), (100.0, 500.0)], dots=True)]
    return Chart(title="times & places", x_label="ranks", y_label="us", lines=lines, **fields)  # type: ignore[arg-type]


def drawn(made: Chart) -> str:
    return render(made, colours_of([made]))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_names_its_axes_and_lines(log: bool) -> None:
    assert {"ranks", "us", "kvcoord", "peer <1>"} <= set(texts(drawn(chart(x_log=log, y_log=log))))


def test_a_label_has_one_colour_in_all_charts() -> None:
    first = Chart(title="t", x_label="x", y_label="y", lines=[Line("a", []), Line("b", [])])
    second = Chart(title="t", x_label="x", y_label="y", lines=[Line("b", []), Line("c", [])])
    colours = colours_of([first, second])
    assert list(colours) == ["a", "b", "c"]
    assert len(set(colours.values())) == 3


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    circles = [len(list(ElementTree.fromstring(drawn(chart(y_log=log))).iter(f"{SVG}circle"))) for log in (False, True)]
    assert circles == [4, 3]


@pytest.mark.parametrize("lines", [[], [Line("nothing", [])], [Line("one", [(3.0, 3.0)])]])
@pytest.mark.parametrize("log", [False, True])
def test_a_chart_with_little_to_show_is_still_one(lines: list[Line], log: bool) -> None:
    made = Chart(title="t", x_label="x", y_label="y", lines=lines, x_log=log, y_log=log)
    ElementTree.fromstring(drawn(made))


@pytest.mark.parametrize(("values", "log"), [([0.0, 7.0], False), ([0.0, 12345.0], False), ([3.0, 4000.0], True)])
def test_ticks_lie_on_the_axis_and_are_few(values: list[float], log: bool) -> None:
    axis = Axis(values, 0.0, 100.0, log=log)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12
    assert all(-0.01 <= axis.pixel(tick) <= 100.01 for tick in ticks)


def test_an_axis_maps_its_ends_to_its_pixels() -> None:
    axis = Axis([0.0, 10.0], 300.0, 20.0, log=False)
    assert (axis.pixel(0.0), axis.pixel(10.0)) == (300.0, 20.0)


@pytest.mark.parametrize(
    ("value", "text"), [(0.05, "0.05"), (250.0, "250"), (1500.0, "1,500"), (12000.0, "12k"), (3e6, "3M"), (2e9, "2G")]
)
def test_numbers_read_as_people_write_them(value: float, text: str) -> None:
    assert number_text(value) == text


def report() -> str:
    rows = [
        compare("step", 4, Series("ours", [10.0]), Series("gloo", [40.0]), Budget(ratio_p50_max=limit))
        for limit in (0.5, 0.1)
    ]
    result = Result(name="agreement", title="Agreement", rows=rows, charts=[chart()], notes=["5 ms & more"])
    return page([result], "a machine, 2 cores", "today")


def test_a_report_says_what_ran_where_and_what_is_met() -> None:
    text = report()
    for part in (
        "a machine, 2 cores",
        "today",
        "Agreement",
        "5 ms &amp; more",
        ">met<",
        ">not met<",
        "times &amp; places",
    ):
        assert part in text


def test_a_report_loads_nothing_and_runs_nothing() -> None:
    text = report()
    assert "<script" not in text
    assert re.findall(r"(?:src|href)=\"(?!#)", text) == []
    assert set(re.findall(r"https?://[^\"<]+", text)) == {"http://www.w3.org/2000/svg"}


def test_a_report_is_well_formed() -> None:
    body = report().removeprefix("<!doctype html>").replace('<meta charset="utf-8">', "").replace("<br>", "")
    ElementTree.fromstring(body)
