"""One operation's votes and when they decide. Knows nothing of messages' way, time or sequence.

    agreement   votes yes with        commits with                    aborts when
    ALL         nothing               None                            any no
    MIN, MAX    an int                the smallest, the largest       any no
    EQUAL       an int                that int                        any no, or two values differ
    INTERSECT   a list of keys        the keys on every list, sorted  any no

A participants mask names who must vote; a vote from anybody else is ignored. A rank has one vote: the first. Votes
that name another agreement or other participants than the first vote did are of another mind: they abort too.
"""

from enum import Enum
from typing import Final

from kvcoord.domain import Agreement, PoolName, Rank, Reason
from kvcoord.protocol.messages import Value, Vote


class Tally(Enum):
    """What became of a vote."""

    RECORDED = "recorded"
    DUPLICATE = "duplicate"
    CONFLICTING = "conflicting"
    NOT_PARTICIPANT = "not_participant"


RECORDED: Final = Tally.RECORDED
_ALL: Final = Agreement.ALL
_MIN: Final = Agreement.MIN
_MAX: Final = Agreement.MAX
_INTERSECT: Final = Agreement.INTERSECT
"""For what is done with every vote: looking a member up in its enum costs several times a global."""


class Ballot:
    """The votes for one operation. `participants`, `agreement` and `kind` are those of its first vote."""

    __slots__ = (
        "_everyone",
        "_mask",
        "_noes",
        "_votes",
        "agreement",
        "kind",
        "mismatch",
        "participants",
        "value",
        "voted",
    )

    def __init__(self, first: Vote, everyone: int) -> None:
        self.kind = first.kind
        self.agreement = first.agreement
        self.participants = participants_of(first.participants, everyone)
        self.voted = 0
        self.value: Value = None
        self.mismatch = -1
        self._everyone = everyone
        self._mask = first.participants
        self._noes: list[tuple[Rank, Vote]] = []
        self._votes: dict[Rank, Vote] = {}

    def record(self, rank: Rank, vote: Vote) -> Tally:
        """Counts one vote. A rank outside the participants, or voting again, changes nothing."""
        bit = 1 << rank
        participants = self.participants
        if vote.participants != self._mask:
            participants = participants_of(vote.participants, self._everyone)
        if not (self.participants | participants) & bit:
            return Tally.NOT_PARTICIPANT
        if self.voted & bit:
            return Tally.DUPLICATE if self._votes[rank] == vote else Tally.CONFLICTING
        self._votes[rank] = vote
        self.voted |= bit
        if not vote.yes:
            self._noes.append((rank, vote))
        elif vote.agreement is not self.agreement or participants != self.participants:
            self._mismatched(rank)
        elif self.agreement is not _ALL:
            self._combine(rank, vote.value)
        return RECORDED

    def _mismatched(self, rank: Rank) -> None:
        if self.mismatch < 0:
            self.mismatch = rank

    def _combine(self, rank: Rank, value: Value) -> None:
        held = self.value
        if self.agreement is _INTERSECT:
            if not isinstance(value, list):
                self._mismatched(rank)
            else:
                self.value = sorted(set(value) if not isinstance(held, list) else set(held) & set(value))
        elif not isinstance(value, int):
            self._mismatched(rank)
        elif not isinstance(held, int):
            self.value = value
        elif self.agreement is _MIN:
            self.value = min(held, value)
        elif self.agreement is _MAX:
            self.value = max(held, value)
        elif held != value:
            self._mismatched(rank)

    @property
    def complete(self) -> bool:
        """Every participant has voted."""
        return self.participants & ~self.voted == 0

    @property
    def refused(self) -> bool:
        """No vote that may still come can make it commit."""
        return bool(self._noes) or self.mismatch >= 0

    def blame(self) -> tuple[Reason, Rank, dict[PoolName, int]]:
        """For a refused ballot: the reason and rank of the first no, and the largest shortfall per pool of all noes."""
        if self._noes:
            rank, vote = self._noes[0]
            shortfall: dict[PoolName, int] = {}
            for _, no in self._noes:
                for pool, pages in no.shortfall.items():
                    shortfall[pool] = max(pages, shortfall.get(pool, 0))
            return vote.reason or Reason.REFUSED, rank, shortfall
        return Reason.UNEQUAL, self.mismatch, {}

    def missing(self) -> list[Rank]:
        """Participants that have not voted, lowest first."""
        return ranks_in(self.participants & ~self.voted)


def participants_of(mask: int, everyone: int) -> int:
    """The participants that a mask names: all ranks when it names none that exists."""
    return (mask & everyone) or everyone


def ranks_in(mask: int) -> list[Rank]:
    """The ranks whose bits are set, lowest first."""
    ranks = []
    while mask:
        low = mask & -mask
        ranks.append(low.bit_length() - 1)
        mask ^= low
    return ranks
