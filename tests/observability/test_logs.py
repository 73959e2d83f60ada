"""Logs: one record is one line, whatever is in it."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvcoord.errors import ConfigError
from kvcoord.observability.logs import configure


@pytest.fixture(autouse=True)
def untouched_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(format: str, message: str, *arguments: object, extra: dict[str, object] | None = None) -> str:
    stream = io.StringIO()
    configure("info", format, "worker-3", stream)
    logging.getLogger("kvcoord.test").info(message, *arguments, extra=extra)
    return stream.getvalue()


def test_a_json_line_carries_time_process_message_and_fields() -> None:
    extra: dict[str, object] = {"page": 4, "operation": "load-back/7", "rank": 3, "group": "a", "ranks": (1, 2)}
    line = json.loads(logged("json", "rank %s lost", 3, extra=extra))
    assert line["time"].endswith("Z")
    assert list(line)[1:] == ["level", "process", "logger", "message", "group", "rank", "operation", "page", "ranks"]
    assert (line["level"], line["process"], line["message"]) == ("info", "worker-3", "rank 3 lost")
    assert (line["group"], line["rank"], line["operation"], line["ranks"]) == ("a", 3, "load-back/7", [1, 2])


def test_a_text_line_carries_the_same() -> None:
    line = logged("text", "rank lost", extra={"page": 4, "rank": 3, "group": "a"})
    assert line.endswith("INFO worker-3 kvcoord.test: rank lost group=a rank=3 page=4\n")


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_peer_cannot_forge_a_second_line(format: str) -> None:
    line = logged(format, "join of %s", "a\nERROR forged\r\x1b[31m\u2028\u0085", extra={"group": "b\nforged"})
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_traceback_stays_on_its_line(format: str) -> None:
    stream = io.StringIO()
    configure("info", format, "worker-3", stream)
    try:
        raise ValueError("the cause")
    except ValueError:
        logging.getLogger("kvcoord.test").exception("failed")
    assert len(stream.getvalue().splitlines()) == 1
    assert "ValueError: the cause" in stream.getvalue()


def test_json_stays_json_with_values_it_has_no_word_for() -> None:
    extra: dict[str, object] = {"age_s": float("nan"), "key": b"\xff", "text": "\ud800", "level": "x", "of": {1: {2}}}
    line = json.loads(logged("json", "odd", extra=extra))
    assert (line["age_s"], line["key"], line["level"], line["of"]) == ("nan", "b'\\xff'", "info", {"1": "{2}"})


def test_a_second_configuration_replaces_the_first_and_leaves_the_handlers_of_others() -> None:
    first, second, foreign = io.StringIO(), io.StringIO(), logging.NullHandler()
    logging.getLogger().addHandler(foreign)
    configure("info", "text", "a", first)
    configure("warning", "text", "b", second)
    logging.getLogger("kvcoord.test").info("below the level")
    logging.getLogger("kvcoord.test").warning("above")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
    assert foreign in logging.getLogger().handlers


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "text", "worker-3")
    logging.getLogger("kvcoord.test").info("hello")
    captured = capsys.readouterr()
    assert "hello" in captured.err
    assert captured.out == ""


def test_an_unknown_level_or_format_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"log_level='loud'.*debug, info, warning, error"):
        configure("loud", "text", "a")
    with pytest.raises(ConfigError, match=r"log_format='xml'.*text, json"):
        configure("info", "xml", "a")
