"""How much room there is on every rank: SGLang's device allocators and host pools as the whole group sees them.

Device slots are taken by the scheduler as well as by the cache, so they are not booked here: in lockstep all ranks take
and free the same numbers, and so the group's free count is this rank's, minus what this rank had more than the poorest
one when both were last counted at the same step. Host slots are taken by the cache alone, at different times on
different ranks (a reservation that one rank could not make), so they are booked in a ledger.

Pools go by SGLang's names. A frame counts those on the device first, then those on the host.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvcoord.protocol.ledger import Ledger
from kvcoord.protocol.messages import Verdict

KV: Final = "kv"
"""The pool that every model has. The unit is a token's slot."""

Needs = dict[str, int]
"""Slots by pool."""

FreeCounts = Mapping[str, Callable[[], int]]
"""By pool, how many slots this rank has free."""


class Capacity:
    """Agreed room. `device_free` and `host_free` count this rank's own."""

    def __init__(self, device_free: FreeCounts, host_free: FreeCounts) -> None:
        self.device_free = dict(device_free)
        self._host_free = dict(host_free)
        self._counts = (*self.device_free.values(), *self._host_free.values())
        self._at = {pool: at for at, pool in enumerate(self._host_free, len(self.device_free))}
        """Where a host pool stands in the ledger and in frames."""
        self.ledger = Ledger(len(self.device_free) + len(self._host_free))
        self._surplus = dict.fromkeys(self.device_free, 0)
        self.host_slots = 0
        """Host slots for KV of the rank that has fewest."""
        self._counted: dict[int, list[int]] = {}
        """What was counted at frames whose verdicts have not been applied, by their rounds."""
        self._compared: tuple[Sequence[int], Sequence[int]] = (), ()
        """The counts, and the agreed ones, that `_surplus` comes from."""

    @property
    def pools(self) -> tuple[str, ...]:
        """What a frame counts, in this order."""
        return (*(f"device.{pool}" for pool in self.device_free), *map(host, self._host_free))

    def now(self) -> list[int]:
        """This rank's own free counts."""
        return [count() for count in self._counts]

    def agreed(self) -> list[int]:
        """What may be taken on every rank, in the same order."""
        return [*map(self.device_available, self.device_free), *map(self.host_available, self._host_free)]

    def begin(self, counted: Sequence[int], agreed: Sequence[int]) -> None:
        """The group begins: what this rank counted, and the smallest counts of all ranks."""
        self.ledger.begin(agreed)
        self.host_slots = agreed[self._at[KV]]
        self._compare(counted, agreed)

    def device_available(self, pool: str = KV) -> int:
        """Device slots free on every rank. Never more than this rank has."""
        return max(0, self.device_free[pool]() - self._surplus[pool])

    def host_available(self, pool: str = KV) -> int:
        """Host slots that may be taken now, on every rank, without asking."""
        return self.ledger.available(self._at[pool])

    def host_short(self, needs: Needs) -> Needs:
        """What is missing on the rank that has fewest; empty when all of it may be taken."""
        short = {pool: slots - self.host_available(pool) for pool, slots in needs.items()}
        return {pool: slots for pool, slots in short.items() if slots > 0}

    def short_here(self, needs: Needs) -> Needs:
        """What is missing in this rank's own host pools."""
        short = {pool: slots - self._host_free[pool]() for pool, slots in needs.items()}
        return {pool: slots for pool, slots in short.items() if slots > 0}

    def take_host(self, needs: Needs) -> None:
        """Every rank takes these slots, or tries to and votes on it."""
        for pool, slots in needs.items():
            self.ledger.issue(self._at[pool], slots)

    def return_host(self, needs: Needs) -> None:
        """Every rank has had these slots and has them back, by an agreed eviction for example."""
        for pool, slots in needs.items():
            self.ledger.credit(self._at[pool], slots)

    def count(self, step: int) -> list[int]:
        """What this step's frame counts. Reservations of the same frame come after it."""
        counted = self._counted[step] = self.now()
        self.ledger.mark(step)
        return counted

    def settle(self, verdict: Verdict) -> None:
        """Takes over the group's counts. A round that closed without a rank says nothing: what was agreed stays."""
        counted = self._counted.pop(verdict.round, [])
        if verdict.absent:
            return
        self.ledger.settle(verdict.round, verdict.capacity)
        if (counted, verdict.capacity) != self._compared:
            self._compare(counted, verdict.capacity)

    def _compare(self, counted: Sequence[int], agreed: Sequence[int]) -> None:
        """Keeps by how much this rank was ahead of the poorest, on the device."""
        self._compared = counted, agreed
        for at, pool in enumerate(self._surplus):
            self._surplus[pool] = counted[at] - agreed[at]


def host(pool: str) -> str:
    """A host pool's name in votes and verdicts."""
    return f"host.{pool}"
