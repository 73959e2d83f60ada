"""Traces: reading, refusing, writing and counting."""

from pathlib import Path

import pytest

from kvcoord.errors import UsageError
from kvcoord.index.keys import block_page_keys
from kvcoord.load.trace import DEMO, Request, read, statistics, write

PUBLIC_TRACES = Path(__file__).parents[2] / ".." / "shared" / "traces"

GOOD = b'{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 9]}\n'


def request(*hash_ids: int, timestamp_ms: int = 0) -> Request:
    return Request(timestamp_ms, 512 * len(hash_ids), 1, hash_ids)


def trace_file(folder: Path, *lines: bytes) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def test_a_line_of_the_public_format_is_read_field_by_field(tmp_path: Path) -> None:
    assert read(trace_file(tmp_path, GOOD)) == [Request(5, 700, 3, (0, 9))]


def test_the_page_keys_are_those_of_the_hash_ids() -> None:
    assert request(4, 7, 1).keys == block_page_keys([4, 7, 1])


def test_an_unknown_field_and_an_empty_line_do_not_matter(tmp_path: Path) -> None:
    more = b'{"timestamp": 5, "type": "chat", "input_length": 700, "output_length": 3, "hash_ids": [0, 9]}\n'
    assert read(trace_file(tmp_path, GOOD, b"\n", more, b"  \r\n")) == [Request(5, 700, 3, (0, 9))] * 2


def test_a_trace_without_a_last_newline_is_whole(tmp_path: Path) -> None:
    assert len(read(trace_file(tmp_path, GOOD, GOOD.rstrip()))) == 2


def test_a_limit_stops_before_the_lines_after_it(tmp_path: Path) -> None:
    path = trace_file(tmp_path, GOOD, GOOD, b"not a request\n")
    assert len(read(path, limit=2)) == 2
    assert read(path, limit=0) == []


def test_a_negative_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="limit=-1"):
        read(trace_file(tmp_path, GOOD), limit=-1)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (GOOD.replace(b"700", b'"700"'), "input_length"),
        (GOOD.replace(b"700", b"700.5"), "input_length"),
        (GOOD.replace(b": 3", b": -3"), "output_length"),
        (GOOD.replace(b": 3", b": null"), "output_length"),
        (GOOD.replace(b"[0, 9]", b"[0, true]"), "hash_ids"),
        (GOOD.replace(b"[0, 9]", b"[0, 18446744073709551616]"), "hash_ids"),
        (GOOD.replace(b"[0, 9]", b"[]"), "hash_ids"),
        (GOOD.replace(b"timestamp", b"time"), "timestamp"),
        (b"[1, 2]\n", "request"),
    ],
)
def test_a_wrong_field_is_refused_with_file_line_and_field(tmp_path: Path, line: bytes, field: str) -> None:
    path = trace_file(tmp_path, GOOD, GOOD, line)
    with pytest.raises(UsageError) as refused:
        read(path)
    assert refused.value.field == f"{path}:3: {field}"
    assert refused.value.fix


@pytest.mark.parametrize(
    "line", [GOOD[:40] + b"\n", b"\xff\xfe\x00\n", b'{"timestamp": "\xff"}\n', b"x" * 5000 + b"\n"]
)
def test_a_line_that_is_not_json_is_refused_with_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = trace_file(tmp_path, GOOD, line)
    with pytest.raises(UsageError) as refused:
        read(path)
    assert refused.value.field.startswith(f"{path}:2")
    assert len(str(refused.value.value)) <= 80


def test_a_timestamp_that_goes_back_is_refused(tmp_path: Path) -> None:
    path = trace_file(tmp_path, GOOD, GOOD.replace(b": 5", b": 4"))
    with pytest.raises(UsageError) as refused:
        read(path)
    assert (refused.value.field, refused.value.value) == (f"{path}:2: timestamp", 4)


def test_a_file_that_cannot_be_opened_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match="directory"):
        write(tmp_path, [])


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    requests = [request(0, 1), request(0, 2**63 - 1, timestamp_ms=8)]
    assert write(tmp_path / "out.jsonl", iter(requests)) == 2
    assert read(tmp_path / "out.jsonl") == requests


def test_only_leading_pages_count_as_hits() -> None:
    found = statistics([request(0, 1, 2), request(0, 1, 3, timestamp_ms=40), request(7, 1, 2, timestamp_ms=90)])
    assert (found.requests, found.pages, found.pages_hit, found.duration_ms) == (3, 9, 2, 90)
    # Page 1 after page 7 is not page 1 after page 0: keys are chained.
    assert found.pages_distinct == 3 + 1 + 3
    assert found.hit_ratio == 2 / 9


def test_a_request_seen_before_hits_in_full() -> None:
    assert statistics([request(0, 1), request(0, 1), request(0)]).pages_hit == 3


def test_an_empty_trace_counts_nothing() -> None:
    found = statistics([])
    assert (found.requests, found.pages, found.duration_ms, found.hit_ratio) == (0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "pages", "pages_hit"),
    [("mooncake_conversation.jsonl", 288_500, 105_710), ("mooncake_synthetic.jsonl", 121_877, 77_953)],
)
def test_the_public_traces_hit_what_is_known_of_them(name: str, pages: int, pages_hit: int) -> None:
    path = PUBLIC_TRACES / name
    if not path.exists():
        pytest.skip(f"the public trace {name} is not beside this checkout")
    found = statistics(read(path))
    assert (found.pages, found.pages_hit) == (pages, pages_hit)


def test_the_shipped_demo_is_small() -> None:
    assert DEMO.stat().st_size <= 200 * 1024
