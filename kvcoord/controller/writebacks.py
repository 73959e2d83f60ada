"""Write-back: pages go to the host when they leave the device. Three ways for a victim, the same on every rank.

*demote* (it is on the host already), *write* (the host has agreed room: its slots are freed when the copy is over) or
*drop* (the host has none). The room is agreed capacity, so the choice needs no vote. Until its copy is over a victim's
slot is quarantined: agreed as free, but handed out only then.
"""

from kvcoord.controller.operations import Operation
from kvcoord.controller.placing import near, take_part, where
from kvcoord.controller.room import Room
from kvcoord.controller.state import CacheState, outcome_of
from kvcoord.controller.tiers import INDEX
from kvcoord.controller.transfers import Transfers
from kvcoord.domain import OperationKind, Outcome, Path, Tier
from kvcoord.errors import InvariantBroken
from kvcoord.index.victims import Victim
from kvcoord.memory.reservation import Refusal
from kvcoord.protocol.messages import Decision


class WriteBacks:
    """Takes over victims of the device tier before their slots are freed."""

    def __init__(self, state: CacheState, room: Room, transfers: Transfers) -> None:
        self._state = state
        self._room = room
        self._transfers = transfers

    def demote(self, victims: list[Victim]) -> list[Victim]:
        """Starts a write for each victim that is not on the host and fits there. Returns those whose slots go now."""
        return [victim for victim in victims if not self._write(victim)]

    def _write(self, victim: Victim) -> bool:
        state = self._state
        end = len(victim.path)
        backed = state.tree.resident(victim.path, Tier.HOST)
        if backed and sum(backed[-1]) == end and backed[-1][0] <= victim.first:
            return False
        if not self._room.make(Tier.HOST, victim.count, victim.path):
            return False
        op = Operation(
            OperationKind.WRITE_BACK, state.next_serial(), 0, Tier.HOST, victim.path, [(victim.first, victim.count)]
        )
        state.consensus.issue(Tier.HOST, op.pages)
        taken = state.pools.reserve(Tier.HOST, op.pages, op.id, near=near(state, victim.path, victim.first))
        if isinstance(taken, Refusal):
            raise InvariantBroken("a covered reserve fits on every rank", f"{op.id} lacks {taken.shortfall}")
        op.tick, op.path = state.tick, Path.COVERED
        op.reservation = taken
        take_part(state, op)
        op.source_slots = victim.slots
        op.leaving = True
        for pool, slots in zip(state.pools.device, victim.slots, strict=True):
            pool.hand_over(slots, INDEX, op.id)
            pool.quarantine(slots, op.id)
        decision = Decision(op.id, Outcome.COMMIT)
        state.count(op.kind, Path.COVERED, decision)
        state.digest.apply(f"commit {op.id} {op.pages}{where(state, op)}")
        state.outcomes.append(outcome_of(decision, Path.COVERED))
        state.operations[op.id] = op
        self._transfers.commit(op)
        return True
