"""Broken variants of the worker: cache logic, pools, index, ledger."""

from typing import Any, Final

import msgspec

from kvcoord.controller import tiers as tiers_module
from kvcoord.controller.agreements import Agreements
from kvcoord.controller.consensus import AgreedConsensus
from kvcoord.controller.loads import Loads
from kvcoord.controller.room import Room
from kvcoord.controller.transfers import Transfers
from kvcoord.controller.worker import WorkerMachine
from kvcoord.controller.writes import Writes
from kvcoord.domain import Outcome, Reason, Tier
from kvcoord.index.node import Node
from kvcoord.index.tree import RadixTree
from kvcoord.memory.reservation import Refusal, Reservation, ReservationState, reserve
from kvcoord.protocol.messages import Decision
from kvcoord.simulation.shape import Options
from kvcoord.simulation.variant import Patch, Variant

_LOCKSTEP: Final = Options(ranks=3, steps=24, fault_s=10.0, lockstep=True)


def _frees_while_copying() -> list[Patch]:
    def give_back(self: Any, op: Any) -> None:
        if op.reservation is not None and op.reservation.state is ReservationState.HELD:
            op.reservation.abort()

    return [(Transfers, "give_back", give_back)]


def _frees_at_copy_timeout() -> list[Patch]:
    original = Transfers.complete

    def complete(self: Any, completion: Any) -> bool:
        op = self._state.operations.get(completion.operation)
        if op is not None and completion.reason is Reason.COPY_TIMEOUT:
            op.copy_open = False
        return original(self, completion)

    return [(Transfers, "complete", complete)]


def _frees_under_a_lease() -> list[Patch]:
    original = Transfers._retract

    def retract(self: Any, op: Any) -> None:
        original(self, op)
        self.give_back(op)

    return [(Transfers, "_retract", retract)]


def _unpins_at_commit() -> list[Patch]:
    original = Transfers.commit

    def commit(self: Any, op: Any) -> None:
        original(self, op)
        self._state.unpin(op)

    return [(Transfers, "commit", commit)]


def _evicts_alone() -> list[Patch]:
    original = Writes.reserve_write

    def reserve_write(self: Any, op: Any, *at_least: Any) -> None:
        free = self._state.pools.free(Tier.HOST)
        if free < op.pages:
            self._room.evict(Tier.HOST, op.pages - free)
        original(self, op, *at_least)

    return [(Writes, "reserve_write", reserve_write)]


def _ledger_is_local() -> list[Patch]:
    original = WorkerMachine._apply_verdict

    def apply_verdict(self: Any, verdict: Any) -> Any:
        own = self.cache.state.pools.free_counts()
        return original(self, msgspec.structs.replace(verdict, capacity=own))

    return [(WorkerMachine, "_apply_verdict", apply_verdict)]


def _recency_by_wall_clock() -> list[Patch]:
    tell, touch = WorkerMachine._tell, RadixTree.touch

    def tell_clock(self: Any, now: float) -> None:
        tell(self, now)
        self.cache.state.tree.wall_s = now

    def touch_by_clock(self: Any, keys: Any, tick: int, priority: int = 0) -> int:
        return touch(self, keys, int(getattr(self, "wall_s", 0.0) * 20), priority)

    return [(WorkerMachine, "_tell", tell_clock), (RadixTree, "touch", touch_by_clock)]


def _digest_without_host() -> list[Patch]:
    return [(RadixTree, "digest", property(lambda self: self._device.digest))]


def _abort_leaks_pins() -> list[Patch]:
    original = Loads._abort

    def abort(self: Any, wanted: Any, decision: Any, path: Any) -> None:
        wanted.lease.pins = []
        original(self, wanted, decision, path)

    return [(Loads, "_abort", abort)]


def _abort_leaks_slots() -> list[Patch]:
    original = Transfers.abort

    def abort(self: Any, op: Any) -> None:
        held, op.reservation = op.reservation, None
        original(self, op)
        op.reservation = None
        self._state.leaked = [*getattr(self._state, "leaked", []), held]

    return [(Transfers, "abort", abort)]


def _half_reservations() -> list[Patch]:
    def half(pools: Any, owner: str, near: int = -1) -> Reservation | Refusal:
        taken = reserve(pools, owner, near)
        if isinstance(taken, Refusal):
            for pool, count in pools:
                if pool.free_count:
                    pool.reserve(min(count, pool.free_count), owner)
                    break
        return taken

    return [(tiers_module, "reserve", half)]


def _splits_forget_pins() -> list[Patch]:
    original = Node.split

    def split(self: Any, count: int) -> Node:
        upper = original(self, count)
        for residency in upper.tiers:
            residency.pins = 0
        return upper

    return [(Node, "split", split)]


def _suspended_rank_decides() -> list[Patch]:
    original = AgreedConsensus.propose

    def propose(self: Any, vote: Any, *, deferred: bool) -> Any:
        if not deferred and not self._rank.active:
            reason, rank = self._rank.suspended_reason, self._rank.suspended_rank
            return Decision(vote.operation, Outcome.ABORT, 0, None, reason, rank)
        return original(self, vote, deferred=deferred)

    return [(AgreedConsensus, "propose", propose)]


def _early_entries_dropped() -> list[Patch]:
    original = WorkerMachine._renew

    def renew(self: Any) -> None:
        self._early.clear()
        original(self)

    return [(WorkerMachine, "_renew", renew)]


def _renews_under_copies() -> list[Patch]:
    original = WorkerMachine._take_calls

    def take_calls(self: Any) -> None:
        copies, self.copies_open = self.copies_open, 0
        try:
            original(self)
        finally:
            self.copies_open += copies

    return [(WorkerMachine, "_take_calls", take_calls)]


def _publishes_on_own_ack() -> list[Patch]:
    original = Transfers.copy_ended

    def copy_ended(self: Any, operation: str, error: Any) -> None:
        op = self._state.operations.get(operation)
        original(self, operation, error)
        if op is not None and error is None and op.tier is Tier.HOST and operation in self._state.operations:
            self._disclaim(op)
            self._publish(op)
            self._end(op)

    return [(Transfers, "copy_ended", copy_ended)]


def _victims_by_slot() -> list[Patch]:
    """Which pages go depends on how full this rank is."""
    original = Room._evict

    def evict(self: Any, tier: Tier, pages: int) -> Any:
        spare = self._state.pools.free(tier) % 2
        return original(self, tier, min(pages + spare, self._state.tree.evictable(tier)))

    return [(Room, "_evict", evict)]


def _agreements_answer_nobody() -> list[Patch]:
    original = Agreements.begin

    def decide(self: Any, decision: Any, path: Any, state: Any) -> bool:
        if decision.operation not in self._open:
            return False
        if self._open[decision.operation] is None:
            del self._open[decision.operation]
            state.digest.apply(f"{decision.outcome} {decision.operation}")
            return True
        self._settle(decision, path, state, in_order=True)
        return True

    return [(Agreements, "decide", decide), (Agreements, "begin", original)]


WORKER_VARIANTS: Final = (
    Variant(
        name="freed_while_copying", breaks="a retracted operation's pages are free at once", make=_frees_while_copying
    ),
    Variant(
        name="freed_at_copy_timeout",
        breaks="the pages of a copy that never ends are free when its time is up",
        make=_frees_at_copy_timeout,
        options=Options(ranks=3, faults=6, fault_kinds=("hang_copies",)),
    ),
    Variant(
        name="freed_under_a_lease",
        breaks="a retracted load-back's pages go while leases read them",
        make=_frees_under_a_lease,
        options=Options(ranks=3, lockstep=True, faults=12, fault_kinds=("fail_copies", "slow_copies")),
    ),
    Variant(name="source_unpinned", breaks="the source of a copy may be evicted", make=_unpins_at_commit),
    Variant(
        name="evict_and_retry_alone",
        breaks="a rank that is full evicts for itself",
        make=_evicts_alone,
        options=_LOCKSTEP,
    ),
    Variant(
        name="ledger_of_one_rank",
        breaks="the ledger counts what is free on this rank",
        make=_ledger_is_local,
        options=_LOCKSTEP,
    ),
    Variant(
        name="wall_clock_recency",
        breaks="recency is the rank's own clock",
        make=_recency_by_wall_clock,
        options=_LOCKSTEP,
    ),
    Variant(name="digest_skips_a_tier", breaks="the digest does not cover the host tier", make=_digest_without_host),
    Variant(name="abort_leaks_pins", breaks="an aborted acquire keeps its pins", make=_abort_leaks_pins),
    Variant(name="abort_leaks_slots", breaks="an aborted write keeps its slots", make=_abort_leaks_slots),
    Variant(name="half_reservation", breaks="a refused reserve keeps what it got", make=_half_reservations),
    Variant(name="split_forgets_pins", breaks="a split run is pinned on one side only", make=_splits_forget_pins),
    Variant(
        name="suspended_rank_decides",
        breaks="a rank without its group aborts for a reason of its own",
        make=_suspended_rank_decides,
        options=Options(ranks=3, pp=1, lockstep=True, faults=20, fault_kinds=("cut_down", "cut_up", "pause_engine")),
    ),
    Variant(
        name="early_entries_dropped",
        breaks="what a new history decides while old copies end is lost",
        make=_early_entries_dropped,
        options=Options(ranks=3, lockstep=False, faults=12, fault_kinds=("hold_copies", "restart_engine")),
    ),
    Variant(
        name="renewed_under_copies",
        breaks="a new history begins while old copies touch its pages",
        make=_renews_under_copies,
    ),
    Variant(
        name="published_alone", breaks="a page is visible when this rank's copy landed", make=_publishes_on_own_ack
    ),
    Variant(
        name="victims_of_one_rank",
        breaks="how much is evicted depends on this rank's pool",
        make=_victims_by_slot,
        options=_LOCKSTEP,
    ),
    Variant(
        name="deferred_outcome_untold",
        breaks="the outcome of a deferred vote is never told",
        make=_agreements_answer_nobody,
        options=_LOCKSTEP,
    ),
)
