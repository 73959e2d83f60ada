"""One rank's engine in a replay: a lockstep scheduler that serves the requests of a trace, one each step.

A step is one message to the worker and one back: publish and write through what the last step computed, release its
lease, advance, and acquire the path of the next request. Then the "forward pass": reused pages are verified, new ones
filled. Every choice here follows from answers that are the same on all ranks, so all engines take the same way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Final

from kvcoord.client import BlockingCacheClient, BlockingLease, PendingOutcome, Ticket
from kvcoord.domain import Aborted, PageKey, Reason
from kvcoord.load.dialogue import DriverPlan, Tally
from kvcoord.load.pace import Pace
from kvcoord.load.pages import EnginePages
from kvcoord.load.trace import Request
from kvcoord.protocol.local import Advanced, Outcome

FULL: Final = (Reason.DEVICE_FULL, Reason.AUXILIARY_FULL)

HandedIn = tuple[Ticket[PendingOutcome], Ticket[None]]

LEASES_WATCHED: Final = 256
"""Requests whose leases may still turn out broken. A load-back ends long before so many others have been served."""

SettledEverywhere = Callable[[int], bool]
"""Given this rank's open operations: whether no rank has any."""


class Engine:
    """Plays requests and counts. `pages` are those of each pool; `settled` is asked after each step that waits for
    operations to end."""

    def __init__(
        self,
        plan: DriverPlan,
        cache: BlockingCacheClient,
        pages: Sequence[EnginePages],
        pace: Pace,
        settled: SettledEverywhere,
    ) -> None:
        self.tally = Tally()
        self.step_ns: list[int] = []
        self.advance_ns: list[int] = []
        self._plan = plan
        self._cache = cache
        self._pages = pages
        self._pace = pace
        self._settled = settled
        self._step_number = 0
        self._lease: BlockingLease | None = None
        """What the last step computed under, until the next step hands it in."""
        self._loaded: deque[tuple[int, list[PageKey]]] = deque(maxlen=LEASES_WATCHED)
        """Leases with pages from the host, and their paths."""
        self._void: list[list[PageKey]] = []
        """Paths of requests that were computed from pages of a load-back that failed on some rank."""

    def serve(self, request: Request) -> None:
        """One request: acquired, computed, and left to the next step to be written through.

        Before it those that turned out to be void are computed once more: on all ranks, since all are told.
        """
        keys = request.keys
        while self._void:
            self.tally.repeats += 1
            self._acquire_step(self._void.pop(0))
        if self._plan.full_pages_only and len(keys) > 1:
            keys = keys[:-1]
        if self._plan.settle:
            self.settle()
        self._pace.wait_for_request(request.timestamp_ms)
        lease = self._acquire_step(keys)
        waiting = self._may_fit_later(lease, keys)
        while waiting and not lease:
            waiting = self._wait_for_room()
            self.tally.retries += 1
            lease = self._acquire_step(keys)
        self.tally.requests += 1
        self.tally.pages_total += len(keys)
        self.tally.pages_hit_device += lease.device_pages
        self.tally.pages_hit_host += lease.host_pages
        if lease.host_pages:
            self._loaded.append((lease.number, keys))
        if not lease:
            self.tally.skipped += 1

    def settle(self) -> None:
        """Steps until every operation has ended on all ranks, and the agreed capacity is exact again."""
        while not self._settled(self._advance_step().operations_open):
            pass
        for _ in range(self._plan.lag + 1):
            self._advance_step()

    def _acquire_step(self, keys: list[PageKey]) -> BlockingLease:
        """A step with a request: acquires, verifies, fills."""
        cache = self._cache
        self._pace.begin_step()
        begun_ns = perf_counter_ns()
        handed_in = self._hand_in()
        advance = cache.advance_nowait(self._step_number)
        acquire = cache.acquire_nowait(keys)
        advanced = advance.wait()
        advanced_ns = perf_counter_ns()
        lease = acquire.wait()
        self.step_ns.append(perf_counter_ns() - begun_ns)
        self.advance_ns.append(advanced_ns - begun_ns)
        self._end_step(handed_in, advanced)
        if lease:
            self._lease = lease
            self._compute(lease, keys)
        else:
            self._note(lease.outcome)
        self._pace.end_step()
        return lease

    def _advance_step(self) -> Advanced:
        """A step without a request."""
        self._pace.begin_step()
        handed_in = self._hand_in()
        advanced = self._cache.advance_nowait(self._step_number).wait()
        self._end_step(handed_in, advanced)
        self._pace.end_step()
        return advanced

    def _hand_in(self) -> HandedIn | None:
        """What the last step computed is published, and its pages are no longer read."""
        lease, self._lease = self._lease, None
        if lease is None:
            return None
        return self._cache.write_lease_nowait(lease, deferred=True), self._cache.release_nowait(lease)

    def _end_step(self, handed_in: HandedIn | None, advanced: Advanced) -> None:
        self._step_number += 1
        self.tally.steps += 1
        if handed_in is not None:
            written, released = handed_in
            self._note(written.wait().outcome)
            released.wait()
        for outcome in advanced.outcomes:
            self._note(outcome)
        self._void += [keys for number, keys in self._loaded if number in advanced.broken]

    def _note(self, outcome: Outcome | None) -> None:
        """Keeps the first abort for each reason: it names rank and shortfall."""
        if isinstance(outcome, Aborted):
            self.tally.aborts_first.setdefault(outcome.reason, outcome)

    def _compute(self, lease: BlockingLease, keys: list[PageKey]) -> None:
        """Reads every page that was cached, writes every page that was not, in every pool."""
        cached = lease.device_pages + lease.host_pages
        self.tally.pages_loaded += sum(count for _, count in lease.loaded)
        if lease.error:
            self.tally.loads_failed += 1
        else:
            self.tally.pages_verified += cached
            for pages, slots in zip(self._pages, lease.slots, strict=True):
                self.tally.pages_corrupt += pages.count_corrupt(keys[:cached], slots[:cached])
        for pages, slots in zip(self._pages, lease.slots, strict=True):
            pages.fill(keys[cached:], slots[cached:])

    def _may_fit_later(self, lease: BlockingLease, keys: list[PageKey]) -> bool:
        """Whether an acquire that was aborted is worth another try. Ranks that decide alone cannot know it together."""
        outcome = lease.outcome
        full = isinstance(outcome, Aborted) and outcome.reason in FULL
        return full and not self._plan.alone and len(keys) <= self._plan.pages_that_fit

    def _wait_for_room(self) -> bool:
        """Steps until an operation has ended. False: none is open any more, so the next try is the last one.

        No operation is started meanwhile, so the tries of one request are bounded by the operations open at its first.
        """
        for _ in range(self._plan.lag + 1):
            while True:
                advanced = self._advance_step()
                if advanced.completed or advanced.retracted:
                    return True
                if not advanced.operations_open:
                    break
        return False
