"""How much room there is on every rank: SGLang's device allocator and host pool as the whole group sees them.

Device slots are taken by the scheduler as well as by the cache, so they are not booked here: in lockstep all ranks take
and free the same numbers, and so the group's free count is this rank's, minus what this rank had more than the poorest
one when both were last counted at the same step. Host slots are taken by the cache alone, at different times on
different ranks (a reservation that one rank could not make), so they are booked in a ledger.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvcoord.protocol.ledger import Ledger
from kvcoord.protocol.messages import Verdict

DEVICE: Final = "device.kv"
HOST: Final = "host.kv"
POOLS: Final = (DEVICE, HOST)
"""What a frame counts, in this order. The unit is a token's slot."""

_DEVICE, _HOST = range(2)


class Capacity:
    """Agreed room. `device_free` and `host_free` count this rank's own."""

    def __init__(self, lag: int, device_free: Callable[[], int], host_free: Callable[[], int]) -> None:
        self.ledger = Ledger(len(POOLS))
        self._device_free = device_free
        self._host_free = host_free
        self._device_surplus = 0
        self.host_slots = 0
        """Host slots of the rank that has fewest."""
        self._counted: deque[tuple[int, int]] = deque(maxlen=lag + 2)

    def now(self) -> list[int]:
        """This rank's own free counts."""
        return [self._device_free(), self._host_free()]

    def begin(self, counted: Sequence[int], agreed: Sequence[int]) -> None:
        """The group begins: what this rank counted, and the smallest counts of all ranks."""
        self.ledger.begin(agreed)
        self.host_slots = agreed[_HOST]
        self._device_surplus = counted[_DEVICE] - agreed[_DEVICE]

    def device_available(self) -> int:
        """Device slots free on every rank. Never more than this rank has."""
        return max(0, self._device_free() - self._device_surplus)

    def host_available(self) -> int:
        """Host slots that may be taken now, on every rank, without asking."""
        return self.ledger.available(_HOST)

    def take_host(self, slots: int) -> None:
        """Every rank takes these slots, or tries to and votes on it."""
        self.ledger.issue(_HOST, slots)

    def return_host(self, slots: int) -> None:
        """Every rank has had these slots and has them back, by an agreed eviction for example."""
        self.ledger.credit(_HOST, slots)

    def count(self, step: int) -> list[int]:
        """What this step's frame counts. Reservations of the same frame come after it."""
        device_free = self._device_free()
        self._counted.append((step, device_free))
        self.ledger.mark(step)
        return [device_free, self._host_free()]

    def settle(self, verdict: Verdict) -> None:
        """Takes over the group's counts. A round that closed without a rank says nothing: what was agreed stays."""
        if verdict.absent:
            return
        self.ledger.settle(verdict.round, verdict.capacity)
        while self._counted and self._counted[0][0] < verdict.round:
            self._counted.popleft()
        if self._counted and self._counted[0][0] == verdict.round:
            self._device_surplus = self._counted.popleft()[1] - verdict.capacity[_DEVICE]
