"""The fields of a configuration struct: their types, how a type reads, and whether a value fits.

Knows struct types in general and no option in particular.
"""

import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, TypeGuard

import msgspec

from kvcoord.errors import ConfigError

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Slots = Annotated[int, msgspec.Meta(ge=1, le=2**28)]
TailSlots = Annotated[int, msgspec.Meta(ge=0, le=2**28)]
"""Slots of one pool on one rank. Each costs some 50 bytes of bookkeeping, so a mistyped number is to end here."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""At most a day: every wait ends."""


def is_section(type_: object) -> TypeGuard[type[msgspec.Struct]]:
    """Whether a field of this type is a section: a struct with options of its own."""
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)


def item_section(type_: object) -> type[msgspec.Struct] | None:
    """The struct that a field of this type lists, None when it is no list of structs."""
    if typing.get_origin(type_) is list:
        (item,) = typing.get_args(type_)
        return item if is_section(item) else None
    return None


def is_optional(type_: object) -> bool:
    """Whether null is a value of this type."""
    return isinstance(type_, types.UnionType) and type(None) in typing.get_args(type_)


def option_names(struct_type: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Dotted names of all options, in order of declaration. Options of list items read `pools[].name`."""
    for field in msgspec.structs.fields(struct_type):
        name = prefix + field.name
        if is_section(field.type):
            yield from option_names(field.type, name + ".")
            continue
        yield name
        item = item_section(field.type)
        if item is not None:
            yield from option_names(item, name + "[].")


def field_type(struct_type: type[msgspec.Struct], dotted: str) -> Any:
    """The type of the option or section `dotted`, None when there is no such name."""
    first, _, rest = dotted.partition(".")
    for field in msgspec.structs.fields(struct_type):
        if field.name == first:
            if not rest:
                return field.type
            return field_type(field.type, rest) if is_section(field.type) else None
    return None


def type_text(type_: Any) -> str:
    """A type as a user reads it: `integer >= 1`, `one of lru, lfu, priority`, `list of text`."""
    if is_optional(type_):
        return " or ".join(type_text(part) for part in typing.get_args(type_) if part is not type(None)) + " or null"
    origin = typing.get_origin(type_)
    if origin is Annotated:
        plain, *metas = typing.get_args(type_)
        return type_text(plain) + "".join(_bounds_text(meta) for meta in metas)
    if origin is list:
        item = item_section(type_)
        what = "mappings: " + ", ".join(item.__struct_fields__) if item else type_text(typing.get_args(type_)[0])
        return f"list of {what}"
    if isinstance(type_, type) and issubclass(type_, Enum):
        return "one of " + ", ".join(str(member.value) for member in type_)
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[type_]


def _bounds_text(meta: msgspec.Meta) -> str:
    if meta.pattern is not None:
        return " of letters, digits, _ . -, at most 64"
    bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", meta.ge), (">", meta.gt)) if bound is not None]
    return f" {bounds[0]}" if bounds else ""


def check_fields(struct: msgspec.Struct) -> None:
    """Check each field of a struct against its declared type and bounds. Call it from `__post_init__`.

    Raises:
        ConfigError: naming the first field that does not fit and what it should be.
    """
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise ConfigError(field.name, value, misfit_text(field.type, error)) from None


def misfit_text(type_: Any, error: msgspec.ValidationError) -> str:
    """What a value of this type should have been."""
    detail = str(error).replace("`", "")
    if "<=" in detail or "<" in detail:
        return detail[0].lower() + detail[1:]
    return f"expected {type_text(type_)}"
