"""The flight recorder: bounded, ordered, and readable after a crash."""

import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcoord
from kvcoord.errors import UsageError
from kvcoord.observability.recorder import DUMPS_KEPT_MAX, Entry, FlightRecorder, load


class Voted(msgspec.Struct, frozen=True):
    rank: int
    key: bytes


def test_the_ring_keeps_the_newest_events_and_says_how_many_it_dropped() -> None:
    recorder = FlightRecorder("worker-0", events_max=3)
    for step in range(5):
        recorder.record(float(step), "step", "", None)
    assert [(entry.index, entry.now_s) for entry in recorder.entries()] == [(2, 2.0), (3, 3.0), (4, 4.0)]
    assert (recorder.recorded, recorder.dropped) == (5, 2)


@settings(max_examples=50, deadline=None)
@given(operations=st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=40), events_max=st.integers(1, 10))
def test_a_story_is_exactly_the_held_events_of_one_operation_in_order(operations: list[str], events_max: int) -> None:
    recorder = FlightRecorder("worker-0", events_max)
    for number, operation in enumerate(operations):
        recorder.record(float(number), "kind", operation, {"number": number})
    held = list(enumerate(operations))[-events_max:]
    for operation in ("a", "b", "c"):
        expected = [(number, {"number": number}) for number, name in held if name == operation]
        assert [(entry.index, entry.detail) for entry in recorder.story(operation)] == expected


def test_a_recorder_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="events_max"):
        FlightRecorder("worker-0", events_max=0)


def test_a_dump_reads_back_with_header_order_and_details(tmp_path: Path) -> None:
    recorder = FlightRecorder("worker-3", events_max=3)
    recorder.record(1.0, "joined", "", {"epoch": 1})
    recorder.record(2.0, "reserved", "write-through/1", {"pages": [1, 2]})
    recorder.record(2.5, "voted", "write-through/1", Voted(rank=3, key=b"\xff\x00"))
    recorder.record(3.0, "line\nbreak \u2028", "load-back/1", None)
    path = tmp_path / "new" / "dump.jsonl"
    recorder.dump(path, "diverged at round 7")

    dump = load(path)
    header = dump.header
    assert (header.process, header.cause, header.version) == ("worker-3", "diverged at round 7", kvcoord.__version__)
    assert (header.events_max, header.dropped) == (3, 1)
    assert dump.entries == [
        Entry(1, 2.0, "reserved", "write-through/1", {"pages": [1, 2]}),
        Entry(2, 2.5, "voted", "write-through/1", {"rank": 3, "key": "/wA="}),
        Entry(3, 3.0, "line\nbreak \u2028", "load-back/1", None),
    ]
    assert dump.story("write-through/1") == dump.entries[:2]


def test_only_the_owner_may_read_a_dump_and_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    recorder = FlightRecorder("worker-0", events_max=3)
    path = tmp_path / "dump.jsonl"
    path.write_text("an older dump, readable by all")
    recorder.dump(path, "again")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_dump_that_cannot_be_written_is_a_typed_error_and_leaves_nothing(tmp_path: Path) -> None:
    recorder = FlightRecorder("worker-0", events_max=3)
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    with pytest.raises(UsageError, match="occupied"):
        recorder.dump(occupied, "cause")
    assert list(tmp_path.iterdir()) == [occupied]
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        recorder.dump(tmp_path / "file" / "dump.jsonl", "cause")


def test_one_unreadable_detail_costs_no_other_event(tmp_path: Path) -> None:
    recorder = FlightRecorder("worker-0", events_max=8)
    recursive: dict[str, object] = {}
    recursive["self"] = recursive
    recorder.record(1.0, "odd", "", {"object": object})
    recorder.record(2.0, "odd", "", {"key": {(1, 2): 3}})
    recorder.record(3.0, "odd", "", recursive)
    recorder.record(4.0, "odd", "", {"text": "\ud800"})
    recorder.record(5.0, "fine", "", {"pages": 1})
    recorder.dump(tmp_path / "dump.jsonl", "cause")
    entries = load(tmp_path / "dump.jsonl").entries
    assert [entry.index for entry in entries] == [0, 1, 2, 3, 4]
    assert entries[1].detail == {"key": {"(1, 2)": 3}}
    assert entries[2].detail == entries[3].detail == {"unreadable": "dict"}
    assert entries[4].detail == {"pages": 1}


def test_repeated_dumps_into_a_folder_reuse_a_bounded_set_of_names(tmp_path: Path) -> None:
    recorder = FlightRecorder("worker/../0", events_max=2)
    paths = [recorder.dump_into(tmp_path, f"cause {number}") for number in range(DUMPS_KEPT_MAX + 1)]
    assert sorted(tmp_path.iterdir()) == sorted(set(paths))
    assert len(set(paths)) == DUMPS_KEPT_MAX
    assert load(paths[-1]).header.cause == f"cause {DUMPS_KEPT_MAX}"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"not json\n", "line 1 is no DumpHeader"),
        (b"\xff\xfe\n", "line 1 is no DumpHeader"),
        (b'{"format":1}\n', "line 1 is no DumpHeader"),
    ],
)
def test_a_file_that_is_no_dump_is_refused_naming_the_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        load(path)


def test_a_truncated_dump_an_absent_one_and_one_of_another_format_are_refused(tmp_path: Path) -> None:
    recorder = FlightRecorder("worker-0", events_max=2)
    recorder.record(1.0, "voted", "op", None)
    path = tmp_path / "dump.jsonl"
    recorder.dump(path, "cause")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(UsageError, match="line 2 is no Entry"):
        load(path)
    path.write_bytes(whole.replace(b'"format":1', b'"format":99'))
    with pytest.raises(UsageError, match="dump format 99"):
        load(path)
    with pytest.raises(UsageError, match="absent"):
        load(tmp_path / "absent.jsonl")


def test_a_heavy_event_makes_room_for_itself_and_the_memory_stays_bounded() -> None:
    recorder = FlightRecorder("worker-0", 10)
    for number in range(10):
        recorder.record(float(number), "light", "")
    recorder.record(10.0, "heavy", "", weight=7)
    assert [entry.kind for entry in recorder.entries()] == ["light"] * 3 + ["heavy"]
    assert (recorder.recorded, recorder.dropped) == (11, 7)
    assert [entry.index for entry in recorder.entries()] == [7, 8, 9, 10]


def test_an_event_that_is_heavier_than_the_ring_is_kept_alone() -> None:
    recorder = FlightRecorder("worker-0", 2)
    recorder.record(0.0, "light", "")
    recorder.record(1.0, "heavy", "", weight=9)
    assert [entry.kind for entry in recorder.entries()] == ["heavy"]
    recorder.record(2.0, "light", "")
    assert [entry.kind for entry in recorder.entries()] == ["light"]
