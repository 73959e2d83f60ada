"""Every exception kvcoord raises, in one place. Each carries fields; the sentence is made from them.

    KvcoordError
    |- UsageError                 the caller asked for something that can never work
    |  |- ConfigError             a configuration value is wrong: field, value, fix
    |- JoinRefused                the coordinator will not have this rank: field, ranks, both values
    |- GroupLost                  the group deadline passed without all ranks: cause
    |- GroupRenewed               the group began anew: what the engine held is void; cause
    |- Diverged                   ranks of one group differ: round, ranks on each side, operation
    |- DeadlineExceeded           a configured wait ran out: phase, limit
    |- PeerUnavailable            nobody answers at an address
    |- TransferFailed             a copy failed: direction, layer, cause
    |- LoadRetracted              a load-back was taken back on all ranks: operation, reason, rank
    |- DriverCallFailed           a GPU's driver refused a call: call, code, detail
    |- FrameError                 bytes from a peer are not a message
    |  |- FrameOversized, FrameMalformed, FrameVersionMismatch
    |- PoolError                  a slot was used against the rules
    |  |- SlotNotAllocated, SlotFreedTwice, SlotOwnerMismatch, SlotStateMismatch
    |- InvariantBroken            kvcoord itself is wrong: stops the process and says which invariant

Expected outcomes (a refused reserve, an aborted operation) are values, not exceptions: see `domain`.
"""

from collections.abc import Sequence


class KvcoordError(Exception):
    """Root of all errors of this package."""


class UsageError(KvcoordError):
    """The caller asked for something that can never work."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        self.field, self.value, self.fix = field, value, fix
        super().__init__(field, value, fix)

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}: {self.fix}"


class ConfigError(UsageError):
    """A configuration value is wrong. `source` says where it came from (a flag, a variable, a file)."""

    def __init__(self, field: str, value: object, fix: str, source: str = "") -> None:
        self.source = source
        super().__init__(field, value, fix)

    def __str__(self) -> str:
        return super().__str__() + (f" (from {self.source})" if self.source else "")


class JoinRefused(KvcoordError):
    """The coordinator refuses this rank; trying again with the same configuration cannot help.

    `field` differs: `rank` has `value`, `other_rank` (-1: the coordinator) has `other_value`.
    """

    def __init__(
        self, group: str, reason: str, field: str, rank: int, value: object, other_rank: int, other_value: object
    ) -> None:
        self.group, self.reason, self.field = group, reason, field
        self.rank, self.value, self.other_rank, self.other_value = rank, value, other_rank, other_value
        super().__init__(group, reason, field, rank, value, other_rank, other_value)

    def __str__(self) -> str:
        refused = f"join refused in group {self.group!r} ({self.reason})"
        if self.reason == "duplicate_rank":
            return (
                f"{refused}: rank {self.rank} is held by a live worker (incarnation {self.other_value}, this one is"
                f" {self.value}); give every worker a rank of its own, or end the other one"
            )
        other = f"rank {self.other_rank}" if self.other_rank >= 0 else "the coordinator"
        fix = _REFUSAL_FIXES.get(self.reason, "make them equal and start again")
        return (
            f"{refused}: {self.field} is {self.value!r} on rank {self.rank} and {self.other_value!r} on {other}; {fix}"
        )


_REFUSAL_FIXES = {
    "version": "run the same release everywhere",
    "range": "set rank and world_size so that the rank is in the group",
    "limit": "raise that limit on the coordinator, or use another one",
}


class GroupLost(KvcoordError):
    """The group did not come together within the group deadline. `cause` names who is missing."""

    def __init__(self, group: str, cause: str, waited_s: float) -> None:
        self.group, self.cause, self.waited_s = group, cause, waited_s
        super().__init__(group, cause, waited_s)

    def __str__(self) -> str:
        return f"group {self.group!r} lost after {self.waited_s:.1f} s: {self.cause}"


class GroupRenewed(KvcoordError):
    """The group began anew: a member came back with nothing, or the ranks differed (divergence: resync).

    It goes on, but what an engine held before is void. Raised by every call until the engine registers again, as after
    a start of its own.
    """

    def __init__(self, group: str, cause: str) -> None:
        self.group, self.cause = group, cause
        super().__init__(group, cause)

    def __str__(self) -> str:
        return (
            f"group {self.group!r} began anew ({self.cause}): leases, slots and cached pages from before are void;"
            " drop the running requests, register again and start at step 0"
        )


class Diverged(KvcoordError):
    """The ranks' digests differ: they have not taken the same decisions.

    `sides` is a list of rank lists with equal digests, the largest first. `operation` is the first that differs,
    empty when the ranks' recorders no longer hold it.
    """

    def __init__(self, group: str, round_number: int, sides: Sequence[Sequence[int]], operation: str) -> None:
        self.group, self.round, self.sides, self.operation = group, round_number, sides, operation
        super().__init__(group, round_number, sides, operation)

    def __str__(self) -> str:
        sides = " against ".join("ranks " + ",".join(map(str, side)) for side in self.sides)
        what = f"first different operation {self.operation}" if self.operation else "operation no longer recorded"
        return f"group {self.group!r} diverged at round {self.round}: {sides}; {what}"


class DeadlineExceeded(KvcoordError):
    """A configured wait ran out. `limit` names the option that sets it."""

    def __init__(self, waiting_for: str, limit: str, limit_s: float) -> None:
        self.waiting_for, self.limit, self.limit_s = waiting_for, limit, limit_s
        super().__init__(waiting_for, limit, limit_s)

    def __str__(self) -> str:
        return f"no {self.waiting_for} within {self.limit}={self.limit_s:g} s"


class PeerUnavailable(KvcoordError):
    """Nobody answers at `address`; `cause` says how that showed."""

    def __init__(self, address: str, cause: str) -> None:
        self.address, self.cause = address, cause
        super().__init__(address, cause)

    def __str__(self) -> str:
        return f"{self.address}: {self.cause}"


class TransferFailed(KvcoordError):
    """A copy failed on this rank. Its pages hold undefined bytes."""

    def __init__(self, transfer: str, layer: int, cause: str) -> None:
        self.transfer, self.layer, self.cause = transfer, layer, cause
        super().__init__(transfer, layer, cause)

    def __str__(self) -> str:
        return f"transfer {self.transfer} failed at layer {self.layer}: {self.cause}"


class LoadRetracted(KvcoordError):
    """A load-back was taken back, since it failed on `rank`: what was computed from its pages is void on all ranks."""

    def __init__(self, operation: str, reason: str, rank: int) -> None:
        self.operation, self.reason, self.rank = operation, reason, rank
        super().__init__(operation, reason, rank)

    def __str__(self) -> str:
        return f"{self.operation or 'a load-back'} was retracted ({self.reason} on rank {self.rank}): acquire again"


class DriverCallFailed(KvcoordError):
    """A GPU's driver answered `call` with `code`, which it describes as `detail`."""

    def __init__(self, call: str, code: int, detail: str) -> None:
        self.call, self.code, self.detail = call, code, detail
        super().__init__(call, code, detail)

    def __str__(self) -> str:
        return f"{self.call} failed with {self.code} ({self.detail})"


class FrameError(KvcoordError):
    """Bytes from a peer are not a message. Counted and dropped; never raised to a user."""

    def __init__(self, cause: str, size_bytes: int) -> None:
        self.cause, self.size_bytes = cause, size_bytes
        super().__init__(cause, size_bytes)

    def __str__(self) -> str:
        return f"{self.cause} (frame of {self.size_bytes} bytes)"


class FrameOversized(FrameError):
    """Longer than the limit. Not decoded."""


class FrameMalformed(FrameError):
    """Truncated, of an unknown kind, or with fields of a wrong type or range."""


class FrameVersionMismatch(FrameError):
    """Another protocol version. The peer is told which one is spoken here."""


class PoolError(KvcoordError):
    """A slot was used against the rules. The pool is unchanged."""

    def __init__(self, pool: str, slot: int, owner: object, found: object) -> None:
        self.pool, self.slot, self.owner, self.found = pool, slot, owner, found
        super().__init__(pool, slot, owner, found)

    def __str__(self) -> str:
        return f"pool {self.pool!r} slot {self.slot} for owner {self.owner!r}: {self._sentence()}"

    def _sentence(self) -> str:
        return f"found {self.found!r}"


class SlotNotAllocated(PoolError):
    """The slot was never handed out (or is outside the pool)."""

    def _sentence(self) -> str:
        return "never allocated"


class SlotFreedTwice(PoolError):
    """The slot was handed out once and is free again."""

    def _sentence(self) -> str:
        return f"already freed by {self.found!r}"


class SlotOwnerMismatch(PoolError):
    """The slot belongs to another owner."""

    def _sentence(self) -> str:
        return f"owned by {self.found!r}"


class SlotStateMismatch(PoolError):
    """The slot is in a state from which this change is not allowed."""

    def _sentence(self) -> str:
        return f"in state {self.found!r}"


class InvariantBroken(KvcoordError):
    """kvcoord itself is wrong. The process stops rather than serve bytes it cannot vouch for."""

    def __init__(self, invariant: str, detail: str) -> None:
        self.invariant, self.detail = invariant, detail
        super().__init__(invariant, detail)

    def __str__(self) -> str:
        return f"invariant {self.invariant!r} broken: {self.detail}"
