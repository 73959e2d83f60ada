"""The host tier over the lives of one rank's engine: whose pages it holds, what goes on, and what is dropped.

An engine names what computes its pages when it registers. Host pages outlive it only for a next one that gives the same
name; for another, or for none, they are dropped before its first call, on every rank alike. It does not know how the
ranks agree on what they keep (`controller.kept`), nor where the bytes are.
"""

from kvcoord.config.limits import Limits
from kvcoord.controller.consensus import Consensus
from kvcoord.controller.kept import NOTHING, HostPages, Keeping, held_keys, host_pages
from kvcoord.controller.kept_shares import SharedKeeping
from kvcoord.controller.state import CacheState
from kvcoord.controller.tiers import INDEX
from kvcoord.domain import PAGE_KEY_BYTES, Tier
from kvcoord.memory.shares import Shares
from kvcoord.protocol.messages import Activate, Decision


def keys_in_a_vote(limits: Limits) -> int:
    """How many page keys one vote may carry."""
    return min(limits.pages_per_operation_max, limits.message_bytes_max // (8 * PAGE_KEY_BYTES))


class HostTier:
    """`settled` when the cache has what the ranks agreed to keep: until then no call is to be taken.

    With `shares` host pages are kept once by ranks that hold the same bytes.
    """

    def __init__(self, keys_max: int, shares: Shares | None = None) -> None:
        self.settled = False
        self._shared = None if shares is None else SharedKeeping(keys_max, shares)
        self._keeping = self._shared or Keeping(keys_max)
        self._model = ""
        self._registered = False
        self._forgetting = False
        self._void = False

    @property
    def uncertain(self) -> bool:
        """Whether there may be pages of which it is not agreed yet that they are kept."""
        if self._shared is not None:
            return not self.settled
        return bool(self._keeping.pages.branches)

    def reached_by(self, memory: bytes) -> None:
        """How other ranks reach the memory of this one: said when a history begins."""
        if self._shared is not None:
            self._shared.memory = memory

    def registered(self, model: str) -> None:
        """An engine begins its life."""
        if not model or model != self._model:
            self._forgetting = True
        self._model = model
        self._registered = True

    def void(self) -> None:
        """What is held is not to be trusted: none of it goes into a new history."""
        self._void = True

    def inherit(self, pages: HostPages, state: CacheState) -> None:
        """The pages of an earlier life, whose bytes are still in their slots, come into an empty cache."""
        self._model = pages.model or self._model
        self._keeping.hold(pages, state)

    def pages(self, state: CacheState) -> HostPages:
        """What could go into a new history: nothing, when an engine of another model has come already."""
        if self._forgetting or self._void:
            return NOTHING
        return host_pages(state, self._model) if self.settled else self._keeping.pages

    def held(self, state: CacheState) -> int:
        """How many keys that is."""
        if self._forgetting or self._void:
            return 0
        if not self.settled:
            return self._keeping.pages.count
        return held_keys(state) if self._model else 0

    def begin(self, activate: Activate, state: CacheState, consensus: Consensus) -> None:
        """A history begins: agree on what is kept."""
        self._void = False
        self.settled = False
        least, most = activate.held_least, activate.held_most
        self._keeping.begin(activate.history, least, most, state, consensus)
        self._settle()

    def decide(self, decision: Decision, state: CacheState, consensus: Consensus) -> bool:
        """A decision. Whether it was about what is kept."""
        if not self._keeping.decide(decision, state, consensus):
            return False
        self._settle()
        return True

    def mapped(self, history: int, state: CacheState, consensus: Consensus) -> None:
        """The memory of the ranks that keep pages for this one can be read."""
        if self._shared is not None:
            self._shared.mapped(history, state, consensus)
            self._settle()

    def _settle(self) -> None:
        """Pages that are kept once come from other ranks too: what computed them is said with them."""
        was_settled, self.settled = self.settled, not self._keeping.open
        if self._shared is None or not self.settled or was_settled:
            return
        if not self._registered:
            self._model = self._shared.model
        else:
            self._forgetting = not self._model or self._model != self._shared.model

    def ready(self, state: CacheState) -> bool:
        """Before each call: whether it can be taken. Drops what an earlier model computed."""
        if self.settled and self._forgetting:
            self._forgetting = False
            for victim in state.tree.evict(Tier.HOST, state.tree.evictable(Tier.HOST)):
                state.pools.free_slots(Tier.HOST, victim.slots, INDEX)
        return self.settled
