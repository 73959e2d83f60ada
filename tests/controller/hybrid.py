"""Groups with pools that keep only the end of a sequence: a window of three pages, and one state."""

from kvcoord.controller.state import CacheState
from kvcoord.controller.tiers import INDEX
from kvcoord.domain import PageKey, Tier
from kvcoord.protocol.local import Acquire, Acquired, Answer, Match, Matched, Release, WriteThrough, join_keys
from tests.controller.cluster import Cluster

WINDOW = 3


Pools = list[dict[str, object]]


def pools(device_window: int = 12, device_states: int = 6, host_window: int = 12, host_states: int = 6) -> Pools:
    """The KV cache, an index beside it, a window and a state."""
    shape: dict[str, object] = {"page_bytes": 64, "layers": 1}
    window = {"kind": "window", "window_pages": WINDOW, "device_slots": device_window, "host_slots": host_window}
    state = {"kind": "state", "device_slots": device_states, "host_slots": host_states}
    return [
        {"name": "kv", **shape},
        {"name": "index", **shape},
        {"name": "window", **shape, **window},
        {"name": "state", **shape, **state},
    ]


class HybridCluster(Cluster):
    """Ranks with such pools. `sizes` as `pools` names them; `last` are those of the last rank where it has others."""

    def __init__(
        self, ranks: int, device: int, host: int | list[int], last: dict[str, int] | None = None, **sizes: int
    ) -> None:
        by_rank = [*[pools(**sizes) for _ in range(ranks - 1)], pools(**sizes | (last or {}))]
        super().__init__(ranks, device, host, pools_by_rank=by_rank)

    def acquire(self, keys: list[PageKey], *, landed: bool = True) -> list[Acquired]:
        """What each rank is given."""
        return [granted(answer) for (answer,) in self.ask(Acquire(join_keys(keys), landed))]

    def hand_in(self, lease: Acquired) -> None:
        """Publishes what this lease computed, and ends it."""
        self.ask(WriteThrough(lease=lease.lease, deferred=True), Release(lease.lease))

    def matched(self, keys: list[PageKey]) -> tuple[int, int]:
        """Pages on device and on host, the same for all ranks."""
        found = {answer for (answer,) in self.ask(Match(join_keys(keys))) if isinstance(answer, Matched)}
        (match,) = found
        return match.device_pages, match.host_pages

    def check(self) -> None:
        super().check()
        for worker in self.workers:
            check_conservation(worker.cache.state)


def granted(answer: Answer) -> Acquired:
    assert isinstance(answer, Acquired)
    return answer


def check_conservation(state: CacheState) -> None:
    """Every slot of every pool is free, or has an owner that accounts for it."""
    state.tree.check()
    for tier in Tier:
        counts = [state.tree.pages(tier)] * state.pools.page_pools + state.tree.tails.counts(tier)
        for pool, count in zip(state.pools.of(tier), counts, strict=True):
            pool.check()
            published = [slot for slot in range(pool.capacity) if pool.owner(slot) == INDEX]
            assert len(published) == count, f"{pool.name}: the index owns {len(published)} slots for {count} pages"
