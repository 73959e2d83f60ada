"""A configuration as a file that would give it again, with the source of each value beside it."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import yaml

from kvcoord.config.load import Config, Loaded


def resolved(loaded: Loaded[Config]) -> str:
    """YAML text of all options. A comment says where each value came from.

    Derived values are those that no source gave and that are not the default either, such as tp for a world size.
    """
    return "\n".join(_lines(loaded.config, "", 0, loaded.sources)) + "\n"


def _lines(struct: msgspec.Struct, prefix: str, depth: int, sources: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * depth
    for field in msgspec.structs.fields(struct):
        name, value = prefix + field.name, getattr(struct, field.name)
        if isinstance(value, msgspec.Struct):
            yield f"{indent}{field.name}:"
            yield from _lines(value, name + ".", depth + 1, sources)
            continue
        source = sources.get(name) or ("default" if value == _default(field) else "derived")
        yield f"{indent}{field.name}: {_scalar(value)}  # {source}"


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required or field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory()


def _scalar(value: Any) -> str:
    """One line of YAML for a value."""
    plain = msgspec.to_builtins(value)
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("...\n").strip()
