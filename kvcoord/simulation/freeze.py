"""A machine's state as one comparable value, so that an explorer sees when it has been there before.

Counters and texts for people are left out: they grow with every event and steer nothing. The production classes are
looked at from outside, field by field; they do not know of it.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Any, Final

import msgspec

_LEFT_OUT: Final = frozenset(
    {
        "aborts",
        "cause",
        "close_times",
        "completions_told",
        "counters",
        "events",
        "ignored",
        "lost_rank",
        "messages",
        "suspended_rank",
        "suspended_reason",
    }
)


def freeze(value: object) -> Hashable:
    """Equal states give equal values. Whatever can be called is left out."""
    return _Freezer().freeze(value)


class _Freezer:
    """One pass. An object that is met again stands as the number of its first meeting."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}

    def freeze(self, value: Any) -> Hashable:
        if value is None or isinstance(value, int | float | str | bytes | Enum):
            return value
        if isinstance(value, dict):
            return tuple([(self.freeze(key), self.freeze(held)) for key, held in value.items()])
        if isinstance(value, list | tuple | deque):
            return tuple([self.freeze(held) for held in value])
        if isinstance(value, set | frozenset):
            return tuple(sorted(self.freeze(held) for held in value))  # type: ignore[type-var]
        if isinstance(value, msgspec.Struct):
            return (type(value).__name__, *[self.freeze(held) for _, held in _fields_of_struct(value)])
        number = self._met.get(id(value))
        if number is not None:
            return ("met", number)
        self._met[id(value)] = len(self._met)
        return (type(value).__name__, *[self.freeze(held) for _, held in _fields(value)])


def _fields_of_struct(value: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    for name in value.__struct_fields__:
        if name not in _LEFT_OUT:
            yield name, getattr(value, name)


def _fields(value: object) -> Iterator[tuple[str, Any]]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names += getattr(value, "__dict__", {})
    for name in names:
        if name.lstrip("_") in _LEFT_OUT or not hasattr(value, name):
            continue
        held = getattr(value, name)
        if not callable(held):
            yield name, held
