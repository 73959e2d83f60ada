"""Pages in several pools: all of them or none, settled once, never lost without a warning."""

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcoord.errors import (
    InvariantBroken,
    PoolError,
    SlotFreedTwice,
    SlotNotAllocated,
    SlotOwnerMismatch,
    SlotStateMismatch,
    UsageError,
)
from kvcoord.memory.reservation import Refusal, Reservation, ReservationState, reserve
from kvcoord.memory.slots import SlotPool, SlotState, SlotStatistics


def held(pools: list[tuple[SlotPool, int]], owner: str = "op") -> Reservation:
    reservation = reserve(pools, owner)
    assert isinstance(reservation, Reservation)
    return reservation


def counts(pool: SlotPool) -> tuple[int, int, int, int]:
    """free, reserved, used, quarantined"""
    pool.check()
    return pool.free_count, pool.reserved_count, pool.used_count, pool.quarantined_count


def drop(reservations: list[Reservation]) -> None:
    reservations.clear()
    gc.collect()


def test_the_page_map_of_every_pool_is_resolved_when_taken() -> None:
    kv, state = SlotPool("kv", 8), SlotPool("state", 2)
    reservation = held([(kv, 4), (state, 1)])
    assert reservation.slots == {"kv": [0, 1, 2, 3], "state": [0]}
    assert (counts(kv), counts(state)) == ((4, 4, 0, 0), (1, 1, 0, 0))
    assert {kv.owner(slot) for slot in reservation.slots["kv"]} == {"op"}
    reservation.commit()
    assert reservation.slots == {"kv": [0, 1, 2, 3], "state": [0]}


def test_a_refusal_names_the_shortfall_of_every_short_pool_and_holds_nothing() -> None:
    pools = [SlotPool("kv", 8), SlotPool("indexer", 8), SlotPool("state", 1), SlotPool("window", 0)]
    refusal = reserve(list(zip(pools, [8, 9, 3, 1], strict=True)), "op")
    assert refusal == Refusal("op", {"indexer": 1, "state": 2, "window": 1})
    assert not refusal
    assert [counts(pool) for pool in pools] == [(8, 0, 0, 0), (8, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0)]


def test_one_rank_with_a_page_less_refuses_whole_and_the_next_smaller_write_fits_everywhere() -> None:
    roomy, tight = SlotPool("host", 8), SlotPool("host", 8)
    older = held([(tight, 1)], "older node")
    older.commit()
    first = held([(roomy, 8)], "write node a")
    refusal = reserve([(tight, 8)], "write node a")
    assert isinstance(refusal, Refusal)
    assert refusal.shortfall == {"host": 1}
    first.abort()
    assert (counts(roomy), counts(tight)) == ((8, 0, 0, 0), (7, 0, 1, 0))
    for pool in (roomy, tight):
        held([(pool, 4)], "write node b").commit()
    assert (counts(roomy), counts(tight)) == ((4, 0, 4, 0), (3, 0, 5, 0))


def test_a_commit_leaves_the_pages_used_by_the_owner() -> None:
    kv, state = SlotPool("kv", 4), SlotPool("state", 2)
    reservation = held([(kv, 3), (state, 1)])
    reservation.commit()
    assert (counts(kv), counts(state)) == ((1, 0, 3, 0), (1, 0, 1, 0))
    kv.free(reservation.slots["kv"], "op")
    assert counts(kv) == (4, 0, 0, 0)


def test_an_abort_gives_the_pages_back_in_every_pool() -> None:
    kv, state = SlotPool("kv", 4), SlotPool("state", 2)
    held([(kv, 3), (state, 2)]).abort()
    assert (counts(kv), counts(state)) == ((4, 0, 0, 0), (2, 0, 0, 0))


def test_quarantined_pages_return_only_when_released() -> None:
    kv, state = SlotPool("kv", 4), SlotPool("state", 2)
    reservation = held([(kv, 4), (state, 1)])
    reservation.quarantine()
    assert (counts(kv), counts(state)) == ((0, 0, 0, 4), (1, 0, 0, 1))
    assert isinstance(reserve([(kv, 1)], "next"), Refusal)
    reservation.release()
    assert (counts(kv), counts(state)) == ((4, 0, 0, 0), (2, 0, 0, 0))


@pytest.mark.parametrize("second", [Reservation.commit, Reservation.abort, Reservation.quarantine])
@pytest.mark.parametrize("first", [Reservation.commit, Reservation.abort, Reservation.quarantine])
def test_a_second_settlement_is_a_broken_invariant_and_the_first_stands(
    first: Callable[[Reservation], None], second: Callable[[Reservation], None]
) -> None:
    pool = SlotPool("kv", 4)
    reservation = held([(pool, 3)])
    first(reservation)
    before, state = counts(pool), reservation.state
    with pytest.raises(InvariantBroken, match="'op'"):
        second(reservation)
    assert (counts(pool), reservation.state) == (before, state)
    if state is ReservationState.QUARANTINED:
        reservation.release()


@pytest.mark.parametrize("settlement", [Reservation.commit, Reservation.abort])
def test_only_a_quarantine_is_followed_by_a_release_and_only_by_one(settlement: Callable[[Reservation], None]) -> None:
    pool = SlotPool("kv", 4)
    settled, reservation = held([(pool, 1)]), held([(pool, 3)])
    settlement(settled)
    before = counts(pool)
    for without_quarantine in (settled, reservation):
        with pytest.raises(InvariantBroken):
            without_quarantine.release()
    assert counts(pool) == before
    reservation.quarantine()
    reservation.release()
    before = counts(pool)
    with pytest.raises(InvariantBroken):
        reservation.release()
    assert counts(pool) == before


def test_slots_freed_behind_a_reservation_are_reported_when_it_settles() -> None:
    pool = SlotPool("kv", 4)
    reservation = held([(pool, 3)])
    pool.free([1], "op")
    with pytest.raises(SlotFreedTwice):
        reservation.commit()
    assert counts(pool) == (2, 2, 0, 0)


def test_asking_for_a_pool_twice_or_for_less_than_nothing_is_a_usage_error_and_holds_nothing() -> None:
    kv, state = SlotPool("kv", 4), SlotPool("state", 4)
    for pools in ([(kv, 1), (kv, 1)], [(kv, 1), (SlotPool("kv", 4), 1)], [(kv, 1), (state, -1)]):
        with pytest.raises(UsageError):
            reserve(pools, "op")
    assert (counts(kv), counts(state)) == ((4, 0, 0, 0), (4, 0, 0, 0))


def test_a_reservation_of_no_pages_is_settled_like_any_other() -> None:
    kv = SlotPool("kv", 1)
    reservation = held([(kv, 0)])
    assert reservation.slots == {"kv": []}
    reservation.quarantine()
    reservation.release()
    held([]).commit()
    assert counts(kv) == (1, 0, 0, 0)


def test_a_reservation_dropped_unsettled_warns_with_its_owner_and_changes_nothing() -> None:
    pool = SlotPool("kv", 4)
    reservations = [held([(pool, 3)], "write-through/17/0")]
    with pytest.warns(ResourceWarning, match="write-through/17/0.*held"):
        drop(reservations)
    assert counts(pool) == (1, 3, 0, 0)


def test_a_quarantine_dropped_before_its_release_warns() -> None:
    pool = SlotPool("kv", 4)
    reservations = [held([(pool, 3)], "load-back/3/0")]
    reservations[0].quarantine()
    with pytest.warns(ResourceWarning, match="load-back/3/0.*quarantined"):
        drop(reservations)
    assert counts(pool) == (1, 0, 0, 3)


def test_a_settled_reservation_is_dropped_in_silence() -> None:
    pool = SlotPool("kv", 8)
    reservations = [held([(pool, 2)], owner) for owner in ("a", "b", "c")]
    reservations[0].commit()
    reservations[1].abort()
    reservations[2].quarantine()
    reservations[2].release()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drop(reservations)
    assert caught == []


def test_an_interpreter_that_ends_with_an_open_reservation_makes_no_noise() -> None:
    program = (
        "from kvcoord.memory.reservation import reserve\n"
        "from kvcoord.memory.slots import SlotPool\n"
        "reservation = reserve([(SlotPool('kv', 4), 2)], 'op')\n"
        "loop = [reservation]; loop.append(loop)\n"
        "assert reservation\n"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@dataclass
class ModelPool:
    """A pool as a plain table: slot -> (state, owner) while held, and the slots that were ever handed out."""

    capacity: int
    held: dict[int, tuple[SlotState, str]] = field(default_factory=dict)
    handed_out: set[int] = field(default_factory=set)

    def take(self, slots: list[int], owner: str) -> None:
        assert len(set(slots)) == len(slots)
        for slot in slots:
            assert 0 <= slot < self.capacity
            assert slot not in self.held, "a slot with two owners"
            self.held[slot] = (SlotState.RESERVED, owner)
            self.handed_out.add(slot)

    def first_error(self, verb: str, slots: list[int], owner: str) -> tuple[type[PoolError], int] | None:
        for position, slot in enumerate(slots):
            if slot not in self.handed_out:
                return SlotNotAllocated, slot
            if slot not in self.held or slot in slots[:position]:
                return SlotFreedTwice, slot
            state, found = self.held[slot]
            if found != owner:
                return SlotOwnerMismatch, slot
            if state not in VERBS[verb][0]:
                return SlotStateMismatch, slot
        return None

    def change(self, verb: str, slots: list[int], owner: str) -> None:
        for slot in slots:
            state = VERBS[verb][1]
            if state is SlotState.FREE:
                del self.held[slot]
            else:
                self.held[slot] = (state, HEIR if verb == "hand_over" else owner)

    def count(self, state: SlotState) -> int:
        return sum(1 for found, _ in self.held.values() if found is state)


HEIR = "index"
DIRECT_OWNERS = ("index", "lease")
CAPACITIES = {"kv": 9, "indexer": 6, "state": 3}
VERBS: dict[str, tuple[set[SlotState], SlotState]] = {
    "commit": ({SlotState.RESERVED}, SlotState.USED),
    "free": ({SlotState.RESERVED, SlotState.USED}, SlotState.FREE),
    "quarantine": ({SlotState.RESERVED, SlotState.USED}, SlotState.QUARANTINED),
    "release": ({SlotState.QUARANTINED}, SlotState.FREE),
    "hand_over": ({SlotState.USED}, SlotState.USED),
}
pool_names = st.sampled_from(sorted(CAPACITIES))
verbs = st.sampled_from(sorted(VERBS))


class PoolsAgainstATable(RuleBasedStateMachine):
    """Reservations over three pools and direct calls, right and wrong ones, compared with a plain table."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = {name: SlotPool(name, capacity) for name, capacity in CAPACITIES.items()}
        self.models = {name: ModelPool(capacity) for name, capacity in CAPACITIES.items()}
        self.open: list[Reservation] = []
        self.operations = 0

    @rule(wanted=st.dictionaries(pool_names, st.integers(0, 5), max_size=3))
    def reserve_in_several_pools(self, wanted: dict[str, int]) -> None:
        self.operations += 1
        owner = f"op-{self.operations}"
        free = {name: CAPACITIES[name] - len(self.models[name].held) for name in wanted}
        missing = {name: count - free[name] for name, count in wanted.items() if count > free[name]}
        outcome = reserve([(self.pools[name], count) for name, count in wanted.items()], owner)
        if isinstance(outcome, Refusal):
            assert missing
            assert outcome.shortfall == missing
            return
        assert not missing
        assert {name: len(slots) for name, slots in outcome.slots.items()} == wanted
        self.open.append(outcome)
        for name, slots in outcome.slots.items():
            self.models[name].take(slots, owner)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["commit", "abort", "quarantine"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        reservation = data.draw(st.sampled_from(self.open))
        if reservation.state is ReservationState.QUARANTINED:
            how = "release"
        getattr(reservation, how)()
        for name, slots in reservation.slots.items():
            self.models[name].change("free" if how == "abort" else how, slots, reservation.owner)
            if how == "commit":
                self.pools[name].hand_over(slots, reservation.owner, HEIR)
                self.models[name].change("hand_over", slots, reservation.owner)
        if how != "quarantine":
            self.open.remove(reservation)

    @rule(name=pool_names, count=st.integers(0, 4), owner=st.sampled_from(DIRECT_OWNERS))
    def reserve_in_one_pool(self, name: str, count: int, owner: str) -> None:
        slots = self.pools[name].reserve(count, owner)
        assert (slots is None) == (count > CAPACITIES[name] - len(self.models[name].held))
        if slots is not None:
            self.models[name].take(slots, owner)

    @rule(data=st.data(), name=pool_names, verb=verbs, owner=st.sampled_from(DIRECT_OWNERS))
    def change_some_slots_of_one_owner(self, data: st.DataObject, name: str, verb: str, owner: str) -> None:
        own = sorted(slot for slot, (_, found) in self.models[name].held.items() if found == owner)
        allowed = [slot for slot in own if self.models[name].held[slot][0] in VERBS[verb][0]]
        if allowed:
            self.call(name, verb, data.draw(st.lists(st.sampled_from(allowed), unique=True)), owner)

    @rule(
        name=pool_names,
        verb=verbs,
        slots=st.lists(st.integers(-2, 10), min_size=1, max_size=4),
        owner=st.sampled_from(DIRECT_OWNERS),
    )
    def change_any_slots(self, name: str, verb: str, slots: list[int], owner: str) -> None:
        self.call(name, verb, slots, owner)

    def call(self, name: str, verb: str, slots: list[int], owner: str) -> None:
        arguments = (slots, owner, HEIR) if verb == "hand_over" else (slots, owner)
        expected = self.models[name].first_error(verb, slots, owner)
        if expected is None:
            getattr(self.pools[name], verb)(*arguments)
            self.models[name].change(verb, slots, owner)
            return
        with pytest.raises(PoolError) as caught:
            getattr(self.pools[name], verb)(*arguments)
        assert (type(caught.value), caught.value.slot) == expected

    @invariant()
    def every_pool_is_as_the_table_says(self) -> None:
        for name, pool in self.pools.items():
            model = self.models[name]
            pool.check()
            reserved, used, quarantined = (model.count(state) for state in list(SlotState)[1:])
            free = CAPACITIES[name] - reserved - used - quarantined
            assert pool.statistics() == SlotStatistics(name, CAPACITIES[name], free, reserved, used, quarantined)
            for slot in range(CAPACITIES[name]):
                state, owner = model.held.get(slot, (SlotState.FREE, None))
                assert (pool.state(slot), pool.owner(slot)) == (state, owner)

    def teardown(self) -> None:
        for reservation in self.open:
            if reservation.state is ReservationState.HELD:
                reservation.quarantine()
            reservation.release()


TestPoolsAgainstATable = PoolsAgainstATable.TestCase
TestPoolsAgainstATable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
