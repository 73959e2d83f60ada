"""What `kvcoord explain` and `kvcoord diff` read out of flight recorders."""

from kvcoord.domain import Aborted, OperationKind, Outcome, Path, Reason
from kvcoord.observability.recorder import Dump, FlightRecorder, parse
from kvcoord.observability.story import explain_abort, part, story
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.messages import Ack, Completion, Decision, Frame, Numbered, StreamVote, Verdict, Vote


def read(recorder: FlightRecorder) -> Dump:
    return parse(recorder.text("test"), "memory")


def rank(number: int) -> FlightRecorder:
    return FlightRecorder(f"rank{number}", 100)


def test_an_operation_is_told_on_all_ranks_in_order_with_who_said_no_and_how_short() -> None:
    one, coordinator = rank(1), FlightRecorder("coordinator", 100)
    no = Vote("w/1", OperationKind.WRITE_THROUGH, False, reason=Reason.HOST_FULL, shortfall={"host.kv": 3})
    one.record(1.0, "frame", "", (b"", Frame(1, 7, [no], [], [8], 0)))
    coordinator.record(1.5, "frame", "", (b"\0g/1/abc/1", Frame(1, 7, [no], [], [8], 0)))
    abort = Decision("w/1", Outcome.ABORT, 0, None, Reason.HOST_FULL, 1, {"host.kv": 3})
    other = Decision("w/2", Outcome.COMMIT)
    coordinator.record(2.0, "verdict", "", (b"\0g/0/def/1", Verdict(1, 7, [other, abort], [], [8])))
    one.record(2.5, "answered", "w/1", Aborted("w/1", Path.VOTED, Reason.HOST_FULL, 1, {"host.kv": 3}))

    told = story([read(coordinator), read(one)], "w/1")

    blame = "host_full: rank 1, host.kv short by 3 pages (limit: host_pages)"
    assert [(line.at_s, line.process, line.text) for line in told] == [
        (0.0, "rank1", "votes no, host_full, host.kv short by 3 pages (limit: host_pages), with frame 7"),
        (0.5, "coordinator", "rank 1 votes no, host_full, host.kv short by 3 pages (limit: host_pages), with frame 7"),
        (1.0, "coordinator", f"ABORT, {blame}, with verdict 7"),
        (1.5, "rank1", f"aborted (voted), {blame}"),
    ]


def test_votes_acks_entries_and_copies_are_told_and_so_is_what_happened_to_the_group_meanwhile() -> None:
    zero = rank(0)
    zero.record(0.5, "suspended", "", {"rank": 2, "cause": "before"})
    zero.record(1.0, "vote", "w/1", (b"", StreamVote(1, Vote("w/1", OperationKind.WRITE_THROUGH, True))))
    zero.record(2.0, "copy_started", "w/1", {"from": "device", "pages": 4})
    zero.record(3.0, "suspended", "", {"rank": 2, "cause": "rank 2 is not reachable"})
    retracted = Completion("w/1", False, drained=False, sequence=9, reason=Reason.COPY_TIMEOUT, rank=2)
    zero.record(4.0, "entry", "w/1", (b"", Numbered(1, retracted)))
    zero.record(5.0, "frame", "", (b"", Frame(1, 3, [], [Ack("w/1", False, Reason.COPY_FAILED)], [8], 0)))
    zero.record(6.0, "suspended", "", {"rank": 2, "cause": "after"})
    assert [line.text for line in story([read(zero)], "w/1")] == [
        "votes yes",
        "from device, pages 4",
        "rank 2, cause rank 2 is not reachable",
        "RETRACT, copy_timeout: rank 2 (limit: timeouts.copy_timeout_s), others still copy, number 9",
        "says its copy failed (copy_failed), with frame 3",
    ]


def test_an_event_that_several_dumps_hold_is_told_once_and_a_later_life_by_its_process() -> None:
    zero = rank(0)
    zero.record(1.0, "copy_started", "w/1", {"pages": 1})
    first = read(zero)
    zero.record(2.0, "copy_ended", "w/1", None)
    second = read(zero)
    later = Dump(header=type(first.header)(1, "rank0", first.header.pid + 1, "", "", 10, 0), entries=first.entries)
    told = story([first, second, later], "w/1")
    other_life = f"rank0 (process {first.header.pid + 1})"
    assert sorted(line.process for line in told) == ["rank0", "rank0", other_life]


def test_another_group_of_the_same_coordinator_can_be_left_out() -> None:
    coordinator = FlightRecorder("coordinator", 100)
    for group in (b"g", b"h"):
        vote = StreamVote(1, Vote("w/1", OperationKind.WRITE_THROUGH, True))
        coordinator.record(1.0, "vote", "w/1", (b"\0" + group + b"/0/abc/1", vote))
    assert len(story([read(coordinator)], "w/1")) == 2
    assert len(story([read(coordinator)], "w/1", group="g")) == 1


def test_what_no_recorder_holds_makes_no_story() -> None:
    assert story([read(rank(0))], "w/1") == []


def recorded(number: int, events: list[str]) -> Dump:
    recorder, digest = rank(number), Digest()
    for event in events:
        digest.apply(event)
    for applied in digest.since(0):
        recorder.record(1.0, "applied", "", applied)
    return read(recorder)


def test_two_ranks_part_at_the_first_event_that_differs() -> None:
    common = ["commit a", "complete a"]
    parting = part(recorded(0, [*common, "commit b 3", "commit c"]), recorded(1, [*common, "abort b", "commit c"]))
    assert parting is not None
    assert parting.parted
    assert (parting.common, parting.last_common) == (2, "complete a")
    assert (parting.first, parting.second) == ("commit b 3", "abort b")


def test_a_rank_that_is_only_behind_has_not_parted() -> None:
    parting = part(recorded(0, ["commit a", "commit b"]), recorded(1, ["commit a"]))
    assert parting is not None
    assert not parting.parted
    assert (parting.first, parting.second) == ("commit b", None)


def test_recorders_without_a_common_event_cannot_be_compared() -> None:
    assert part(recorded(0, ["commit a"]), recorded(1, ["commit b"])) is None


def test_every_reason_of_time_or_room_names_its_limit() -> None:
    for reason in (Reason.VOTE_TIMEOUT, Reason.COPY_TIMEOUT, Reason.HOST_FULL, Reason.DEVICE_FULL, Reason.LIMIT):
        assert "limit: " in explain_abort(reason, 1, {})
    assert explain_abort(Reason.REFUSED, -1, {}) == "refused: no single rank"
