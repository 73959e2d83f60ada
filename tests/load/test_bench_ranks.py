"""What the ranks of an agreement benchmark do: arrive as planned, take part in all cases, end with their bed."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvcoord.load.bench.agreement import Case, Effort, case_rows, cases, run_case
from kvcoord.load.bench.bed import open_bed
from kvcoord.load.bench.dialogue import Act, Block, Subject
from kvcoord.load.bench.rank import lateness, timed
from kvcoord.load.bench.star import NUMBER, serve

PROMISED = {
    *("case", "ranks", "p50_us", "p99_us", "peer", "peer_p50_us", "peer_p99_us", "ratio_p50", "ratio_p99"),
    *("budget", "met"),
}


def block(**fields: object) -> Block:
    return Block(number=7, subject=Subject.MEMBER, act=Act.STEP, count=50, **fields)  # type: ignore[arg-type]


def test_one_rank_at_a_time_is_late() -> None:
    by_rank = [list(lateness(block(late_s=0.005), rank, 4)) for rank in range(4)]
    late = [sum(1 for seconds in act if seconds > 0) for act in zip(*by_rank, strict=True)]
    assert late == [1] * 50
    assert all(any(seconds > 0 for seconds in times) for times in by_rank)
    assert max(map(max, by_rank)) <= 0.005


def test_every_rank_arrives_within_the_spread_by_itself() -> None:
    first, second = (list(lateness(block(spread_s=0.001), rank, 2)) for rank in range(2))
    assert first != second
    assert all(0 <= seconds <= 0.001 for seconds in first + second)
    assert first == list(lateness(block(spread_s=0.001), 0, 2))


def test_each_act_of_a_block_is_done_once_with_a_name_of_its_own() -> None:
    done: list[tuple[str, int]] = []
    times = timed(block(votes=3), 0, 2, lambda name, votes: done.append((name, votes)))
    assert done == [(f"7/{number}", 3) for number in range(50)]
    assert len(times) == 50


@pytest.fixture
def star() -> Iterator[list[socket.socket]]:
    pairs = [socket.socketpair() for _ in range(3)]
    hub = threading.Thread(target=serve, args=([near for near, _ in pairs],))
    hub.start()
    yield [far for _, far in pairs]
    for _, far in pairs:
        far.close()
    hub.join()
    for near, _ in pairs:
        near.close()


def test_the_star_tells_every_rank_the_smallest_number(star: list[socket.socket]) -> None:
    for number, member in enumerate(star, start=5):
        member.send(NUMBER.pack(number))
    assert [NUMBER.unpack(member.recv(NUMBER.size)) for member in star] == [(5,)] * 3


def test_every_act_of_the_design_has_a_case_and_every_budget_a_row() -> None:
    made = cases(4, sidecar=True)
    assert {case.block.act for case in made} == set(Act)
    assert {0, 1, 16, 64} <= {case.block.votes for case in made if case.block.act is Act.STEP}
    assert {1, 2, 4} <= {case.block.lag for case in made}
    assert {case.block.late_s for case in made} == {0.0, 0.005}
    for case in made:
        assert all(ours in case.ours and peer in case.peers for ours, peer in case.budgets)


async def test_members_agree_step_and_cover_beside_the_star() -> None:
    effort = Effort(blocks=1, acts=4)
    async with open_bed(2, [1], sidecar=False, gloo=False) as bed:
        for act, subject, peers in (
            (Act.IMMEDIATE, Subject.MEMBER, (Subject.STAR,)),
            (Act.STEP, Subject.MEMBER, ()),
            (Act.COVERED, Subject.LEDGER, ()),
        ):
            measured = Block(number=0, subject=subject, act=act, count=0, votes=2)
            case = Case(name="case", block=measured, ours=(subject,), peers=peers)
            series = await run_case(bed, case, effort)
            assert {len(each.micros) for each in series.values()} == {8}
            rows = case_rows(case, 2, series)
            assert len(rows) == len(peers)
            assert all(set(row.__struct_fields__) >= PROMISED for row in rows)
