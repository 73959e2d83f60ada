"""Small groups to be explored: how many of what, and how often what may go wrong."""

from typing import Final

import msgspec

FAULTS: Final = ("suspect", "crash", "restart", "lose", "fail", "repeat", "twice")


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """A small group, and how often what may go wrong. `states_max` bounds the search."""

    name: str
    ranks: int = 2
    coordinators: int = 1
    operations: int = 1
    lockstep: bool = False
    steps: int = 2
    suspect: int = 0
    """Ranks that take their coordinator for lost and go to the next one."""
    crash: int = 0
    """Coordinators that lose everything."""
    restart: int = 0
    """Ranks that lose everything."""
    lose: int = 0
    """Connections that a coordinator sees break."""
    fail: int = 0
    """Copies that fail."""
    repeat: int = 0
    """Heartbeats at which a rank says again what is without an answer."""
    twice: int = 0
    """Messages that come once more."""
    states_max: int = 1_000_000


SCOPES: Final = (
    Scope(name="one operation, 2 ranks: a failed copy, a lost member", fail=1, lose=1),
    Scope(name="one operation, 2 ranks: coordinator restarted", crash=1, repeat=3),
    Scope(name="one operation, 2 ranks: two changes of coordinator", coordinators=2, suspect=2),
    Scope(name="one operation, 2 ranks: change of coordinator, restart", coordinators=2, suspect=1, crash=1, repeat=2),
    Scope(name="one operation, 2 ranks: a rank restarted", restart=1, repeat=2),
    Scope(name="one operation, 3 ranks: a failed copy", ranks=3, fail=1),
    Scope(name="one operation, 3 ranks: coordinator restarted", ranks=3, crash=1, repeat=3),
    Scope(name="two operations, 2 ranks: a message twice", operations=2, twice=1),
    Scope(name="two operations, 2 ranks: coordinator restarted", operations=2, crash=1, repeat=2),
    Scope(name="rounds, 2 ranks: coordinator restarted", lockstep=True, crash=1, repeat=3, steps=3, fail=1),
    Scope(name="rounds, 2 ranks: two changes of coordinator", lockstep=True, coordinators=2, suspect=2, steps=3),
    Scope(name="rounds, 3 ranks: a failed copy", lockstep=True, ranks=3, fail=1, steps=3),
)
"""What `kvcoord simulate --explore` looks at; each small enough for every run of the tests."""
