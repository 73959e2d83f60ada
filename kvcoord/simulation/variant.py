"""A machine broken on purpose: what is changed in the production classes, for the time of a simulation only."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from kvcoord.simulation.scopes import Scope
from kvcoord.simulation.shape import Options

Patch = tuple[object, str, Any]
"""(class or module, name, what stands there instead)."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """`breaks` says what is wrong. `make` gives the patches; `options` are worlds in which it shows soon.

    With a `scope` it is looked for by exploration: it needs an order of events that seeds seldom meet.
    """

    name: str
    breaks: str
    make: Callable[[], Sequence[Patch]]
    options: Options = Options(ranks=3, steps=24, fault_s=10.0)
    scope: Scope | None = None


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """The production classes are broken in here, and whole again afterwards."""
    held = []
    for owner, name, replacement in variant.make():
        held.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in reversed(held):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


_ABSENT = object()
