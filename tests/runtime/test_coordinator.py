import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvcoord.config import Limits, Timeouts
from kvcoord.domain import OperationKind, Outcome, Reason
from kvcoord.errors import ConfigError, PeerUnavailable
from kvcoord.protocol.codec import encode
from kvcoord.protocol.effects import DivergenceSeen, GroupSuspended, JoinFailed, VerdictReady
from kvcoord.protocol.messages import Decision, Frame, Heartbeat, StatusRequest
from kvcoord.protocol.rank import RankLimits
from tests.runtime.places import SCHEMES, Place


@pytest.fixture(params=SCHEMES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(request.param, tmp_path, stack)


async def test_all_ranks_get_the_same_decision(place: Place) -> None:
    await place.coordinator()
    ranks = await place.ranks(2)
    for rank in ranks:
        rank.vote("write/1")
    entries = [(await rank.applied("write/1")).entry for rank in ranks]
    assert entries[0] == entries[1] == Decision("write/1", Outcome.COMMIT, sequence=1)


async def test_a_no_aborts_on_every_rank_and_names_who_said_it(place: Place) -> None:
    await place.coordinator()
    ranks = await place.ranks(2)
    ranks[1].vote("write/1", yes=False)
    for rank in ranks:
        entry = (await rank.applied("write/1")).entry
        assert isinstance(entry, Decision)
        assert (entry.outcome, entry.reason, entry.rank, entry.shortfall) == (
            Outcome.ABORT,
            Reason.HOST_FULL,
            1,
            {"kv": 3},
        )


async def test_a_vote_that_never_comes_is_an_abort_after_the_vote_timeout(place: Place) -> None:
    await place.coordinator(timeouts=Timeouts(vote_timeout_s=0.05))
    ranks = await place.ranks(2)
    ranks[0].vote("write/1")
    entry = (await ranks[1].applied("write/1")).entry
    assert (entry.reason, entry.rank) == (Reason.VOTE_TIMEOUT, 1)


async def test_a_round_closes_with_one_verdict_for_all(place: Place) -> None:
    coordinator = await place.coordinator()
    ranks = await place.ranks(2, lockstep=True)
    ranks[0].frame(0, free=[4, 9])
    ranks[1].frame(0, free=[8, 3])
    for rank in ranks:
        await rank.until(lambda rank=rank: VerdictReady(0) in rank.effects)  # type: ignore[misc]
    [group] = coordinator.snapshot().groups
    assert (group.round, group.rounds_closed) == (0, 1)
    assert group.free_pages == {"device.kv": 4, "host.kv": 3}


async def test_different_digests_are_told_with_round_and_sides(place: Place) -> None:
    coordinator = await place.coordinator()
    ranks = await place.ranks(3, lockstep=True)
    for rank, digest in zip(ranks, (5, 6, 5), strict=True):
        rank.frame(0, digest=digest)
    for rank in ranks:
        await rank.until(lambda rank=rank: any(isinstance(effect, DivergenceSeen) for effect in rank.effects))  # type: ignore[misc]
        [seen] = [effect for effect in rank.effects if isinstance(effect, DivergenceSeen)]
        assert (seen.round, seen.sides) == (0, [[0, 2], [1]])
    assert coordinator.snapshot().groups[0].divergences == 1
    assert "divergence" in [entry.kind for entry in coordinator.recorder.entries()]


async def test_ranks_of_one_group_may_come_through_different_listeners(place: Place) -> None:
    coordinator = await place.coordinator(place.address, place.other_address)
    assert len(coordinator.addresses) == 2
    first, second = await place.rank(0, 2), await place.rank(1, 2, place.other_address)
    first.vote("write/1")
    second.vote("write/1")
    assert await first.applied("write/1") == await second.applied("write/1")


async def test_a_rank_that_is_silent_is_lost_and_the_others_are_told(place: Place) -> None:
    coordinator = await place.coordinator(timeouts=Timeouts(heartbeat_interval_s=0.02, heartbeat_timeout_s=0.1))
    patient = RankLimits(heartbeat_interval_s=0.02)
    silent = RankLimits(heartbeat_interval_s=60.0, heartbeat_timeout_s=120.0)
    ranks = [await place.rank(0, 2, limits=patient), await place.rank(1, 2, limits=silent)]
    await ranks[0].until(lambda: any(isinstance(effect, GroupSuspended) for effect in ranks[0].effects))
    [told] = [effect for effect in ranks[0].effects if isinstance(effect, GroupSuspended)][:1]
    assert told.rank == 1
    assert coordinator.snapshot().groups[0].ranks_lost >= 1


async def test_a_killed_rank_is_noticed_at_the_next_word_to_it(place: Place) -> None:
    coordinator = await place.coordinator()
    ranks = await place.ranks(2)
    await ranks[1].kill()
    await _nobody_there(coordinator.snapshot, place, ranks[0])
    told = [effect for effect in ranks[0].effects if isinstance(effect, GroupSuspended)]
    assert [effect.rank for effect in told] == [1]
    [group] = coordinator.snapshot().groups
    assert not group.ready
    assert "waiting for ranks 1 of 2" in group.reason


async def _nobody_there(snapshot: object, place: Place, survivor: object) -> None:
    """ZeroMQ takes a moment to notice: until it has, a word to the dead one is queued."""
