"""Load-backs that the group may still take back after an engine was given their pages. Pure.

A retraction is told with an `Advanced`, which names leases and operations. It is kept here until then which copies
belong to which: those who wait for one of them, or ask later, hear that its pages are void.
"""

from collections.abc import Mapping, Sequence

from kvcoord.client.progress import Landing
from kvcoord.domain import OperationId, Reason
from kvcoord.errors import LoadRetracted
from kvcoord.protocol.local import Advanced


class Retractions:
    """By lease, until that is released; and by operation for load-backs without a lease, until they have ended."""

    __slots__ = ("_early", "_leases", "_loads")

    def __init__(self) -> None:
        self._leases: dict[int, tuple[Landing, ...]] = {}
        self._loads: dict[OperationId, Landing] = {}
        self._early: dict[int, LoadRetracted] = {}
        """Of leases whose acquire is not answered yet: answers come in any order."""

    def hold(self, lease: int, landings: tuple[Landing, ...]) -> None:
        """A lease was granted. `landings` are the copies that it shares, and its own as the last."""
        self._leases[lease] = landings
        early = self._early.pop(lease, None)
        if early is not None:
            landings[-1].retract(early)

    def follow(self, landing: Landing) -> None:
        """A load-back without a lease has begun."""
        self._loads[landing.operation] = landing

    def release(self, lease: int) -> None:
        """The engine reads these pages no more."""
        self._leases.pop(lease, None)

    def take(self, advanced: Advanced, *, acquiring: bool) -> None:
        """What a step has told. `acquiring`: the acquire of a lease that is not known may be unanswered."""
        told = {of: LoadRetracted(of, reason.value, rank) for of, reason, rank in advanced.retracted}
        for lease in advanced.broken:
            landings = self._leases.get(lease)
            if landings is not None:
                landings[-1].retract(_cause(landings, told))
                for shared in landings[:-1]:
                    shared.look_again()
            elif acquiring:
                self._early[lease] = _cause((), told)
        for operation in advanced.completed:
            self._loads.pop(operation, None)
        for operation, error in told.items():
            landing = self._loads.pop(operation, None)
            if landing is not None:
                landing.retract(error)

    def clear(self) -> None:
        """The group began anew, or the session is over: whoever waits has been told so."""
        self._leases.clear()
        self._loads.clear()
        self._early.clear()


def _cause(landings: Sequence[Landing], told: Mapping[OperationId, LoadRetracted]) -> LoadRetracted:
    """Which retraction it was. A copy that had landed here before the lease shared it is not among its `landings`."""
    for landing in landings:
        if landing.operation in told:
            return told[landing.operation]
    return next(iter(told.values()), LoadRetracted("", Reason.COPY_FAILED.value, -1))
