"""Messages and effects as short lines of text, for transcripts."""

from enum import Enum

import msgspec

from kvcoord.protocol import messages
from kvcoord.protocol.effects import Activated, Note
from kvcoord.protocol.messages import epoch_number

_ALWAYS = {"ok", "outcome", "operation", "yes", "round", "missing"}
_NEVER = {"version", "group", "world_size", "coordinator", "fingerprint"}


def show(value: object) -> str:
    """A struct as `Name field=value ...`; fields with their default value are left out."""
    if isinstance(value, Activated):
        return f"Activated {'fresh' if value.fresh else 'resumed'}"
    if isinstance(value, Note):
        words = [f"notes {value.kind}", value.operation, *(f"{k}={_plain(v)}" for k, v in value.detail.items())]
        return " ".join(word for word in words if word and not word.startswith("group="))
    if not isinstance(value, msgspec.Struct):
        return _plain(value)
    words = [type(value).__name__]
    for field in msgspec.structs.fields(value):
        held = getattr(value, field.name)
        if field.name in _NEVER or (field.name not in _ALWAYS and held == _default(field)):
            continue
        words.append(f"{field.name}={_field(field.name, held)}")
    return " ".join(words)


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _field(name: str, value: object) -> str:
    if name in ("epoch", "history") and isinstance(value, int):
        return f"{epoch_number(value)}@{value & ((1 << messages.INCARNATION_BITS) - 1)}"
    return _plain(value)


def _plain(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return f"({show(value)})"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, dict):
        items = ((key, item) for key, item in value.items() if key != "group")
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in items) + "}"
    return str(value)
