"""Attaching and detaching storage while the engine runs: on every rank or on none, and with nothing left behind.

SGLang asks every rank at the same point of its scheduler, and each then succeeds or fails alone. A rank that fails to
attach leaves the others waiting inside a collective for ever. So the ranks vote: before the first collective of an
attach, and before a detach stops the storage threads. A vote here blocks for a round trip, once an attachment.

A storage thread that stops while another rank's still waits for it would leave that one in a collective too. So before
threads are stopped each rank waits until its own have done all they can: what they have then not done, they wait for
no other rank's thread to do.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from kvcoord.domain import OperationKind, Outcome, Reason
from kvcoord.integrations.sglang.rounds import Rounds
from kvcoord.integrations.sglang.storage import Storage

Told = tuple[bool, str]
"""As SGLang answers its operator: done or not, and a sentence."""

_POLL_S: Final = 0.001


class Attachment:
    """The storage attachment of one cache. `wait_limit_s` bounds how long storage threads may take to come to rest."""

    def __init__(self, tree: Any, rounds: Rounds, storage: Storage, wait_limit_s: float) -> None:
        self._tree = tree
        self._rounds = rounds
        self._storage = storage
        self._wait_limit_s = wait_limit_s

    def attach(self, proceed: Callable[[], Told]) -> Told:
        """SGLang's own attaching, which all ranks finish or none. Raises as `Member.decide`."""
        controller = self._tree.cache_controller
        ballot = Ballot(self._rounds, "attach-storage")
        create_groups = controller._create_sync_groups

        def create_groups_together() -> Any:
            if not ballot.cast(yes=True):
                raise RuntimeError(ballot.refusal)
            return create_groups()

        controller._create_sync_groups = create_groups_together
        try:
            done, said = proceed()
        finally:
            del controller._create_sync_groups
        ballot.cast(yes=False)
        self._rounds.event(f"attach-storage {done}")
        return done, said

    def detach(self, proceed: Callable[[], Told]) -> Told:
        """SGLang's own detaching, when every rank's storage threads are at rest. Raises as `Member.decide`."""
        ballot = Ballot(self._rounds, "detach-storage")
        if not ballot.cast(yes=self.settle()):
            return False, ballot.refusal
        self._storage.answer()
        self._tree.take_all_from_storage()
        done, said = proceed()
        self._storage.reset()
        self._rounds.event(f"detach-storage {done}")
        return done, said

    def settle(self) -> bool:
        """Waits until this rank's storage threads are at rest. False: they were not within the limit."""
        give_up_at = time.monotonic() + self._wait_limit_s
        while not self._storage.is_settled():
            if time.monotonic() > give_up_at:
                return False
            time.sleep(_POLL_S)
        return True


class Ballot:
    """One vote of all ranks on one thing, cast at most once by each."""

    def __init__(self, rounds: Rounds, what: str) -> None:
        self._rounds = rounds
        self._what = what
        self._operation = rounds.name(what)
        self._outcome: bool | None = None
        self.refusal = ""
        """Why it was refused: which rank said no, or said nothing."""

    def cast(self, *, yes: bool) -> bool:
        """What the ranks have decided. Only the first call votes."""
        if self._outcome is None:
            decision = self._rounds.decide(self._operation, OperationKind.CUSTOM, Reason.REFUSED, yes=yes)
            self._outcome = decision.outcome is Outcome.COMMIT
            if not self._outcome:
                self.refusal = f"{self._what} refused for all ranks: {decision.reason} on rank {decision.rank}"
        return self._outcome
