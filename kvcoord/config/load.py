"""Fill a configuration struct from a file, the environment and flags: flag > environment > file > default.

The processes of a node share a file and an environment. So options of the other kind of process are left alone, and a
section named after one (`coordinator:`, `worker:`, `KVCOORD_WORKER__HTTP`) holds what it alone reads and goes before
what stands beside it. What no process knows is an error.
"""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import yaml

from kvcoord.config.fields import field_type, is_optional, is_section, item_section, misfit_text, option_names
from kvcoord.config.names import VARIABLE_PREFIX, nearest, option_name, variable_name
from kvcoord.config.process import CoordinatorConfig, WorkerConfig
from kvcoord.config.source import as_section, parse_yaml, read_file
from kvcoord.errors import ConfigError

Config = TypeVar("Config", bound=msgspec.Struct)

PROCESSES: Final[Mapping[str, type[msgspec.Struct]]] = {"coordinator": CoordinatorConfig, "worker": WorkerConfig}
"""Sections of a shared file, by name."""


class Given(NamedTuple):
    """A value as some source gave it. `text`: it is a string that stands for a value of the option's type."""

    value: object
    source: str
    text: bool


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Config]):
    """A valid configuration. `sources` says where each value came from; an option not in it has its default."""

    config: Config
    sources: Mapping[str, str]


def load(
    config_type: type[Config],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded[Config]:
    """Load a configuration.

    Args:
        config_type: the struct to fill.
        file: YAML or TOML, by suffix.
        environment: usually `os.environ`; only names that begin with KVCOORD_ are read.
        flags: values by dotted option name. None means that the flag was not given; text is converted.

    Raises:
        ConfigError: an unknown option, a value of a wrong type or range, options that contradict each other, or a
            file that cannot be read. Names the option, the value, what it should be and the source.
    """
    given: dict[str, Given] = {}
    if file is not None:
        given |= _from_file(config_type, read_file(file), str(file))
    given |= _from_environment(config_type, environment or {})
    for name, value in (flags or {}).items():
        if value is not None:
            _check_option(config_type, name, value, f"flag {name}")
            given[name] = Given(value, f"flag {name}", isinstance(value, str))
    config = _build(config_type, "", given)
    return Loaded(config, {name: value.source for name, value in given.items()})


def _from_file(config_type: type[msgspec.Struct], content: dict[str, object], source: str) -> dict[str, Given]:
    shared: dict[str, Given] = {}
    own: dict[str, Given] = {}
    for key, value in content.items():
        if key in PROCESSES and _is_process(config_type):
            section = dict(_walk(PROCESSES[key], as_section(key, value, source), source))
            if PROCESSES[key] is config_type:
                own |= section
        elif key in config_type.__struct_fields__:
            shared |= _walk(config_type, {key: value}, source)
        else:
            # Another process reads it, or nobody does and the walk says so.
            readers = [other for other in _others(config_type) if key in other.__struct_fields__] or [config_type]
            for reader in readers:
                dict(_walk(reader, {key: value}, source))
    return shared | own


def _walk(
    struct_type: type[msgspec.Struct], section: dict[str, object], source: str, prefix: str = ""
) -> Iterator[tuple[str, Given]]:
    """The options in a section of a file, by dotted name below `struct_type`."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct_type)}
    for key, value in section.items():
        name = prefix + key
        if key not in types:
            _raise_unknown(struct_type, name, value, source, prefix)
        if is_section(types[key]):
            yield from _walk(types[key], as_section(name, value, source), source, name + ".")
        else:
            yield name, Given(value, source, text=False)


def _from_environment(config_type: type[msgspec.Struct], environment: Mapping[str, str]) -> dict[str, Given]:
    shared: dict[str, Given] = {}
    own: dict[str, Given] = {}
    for variable in sorted(name for name in environment if name.startswith(VARIABLE_PREFIX)):
        name, target, value = option_name(variable), shared, environment[variable]
        section, _, rest = name.partition(".")
        if rest and section in PROCESSES and _is_process(config_type):
            reader, name, target = PROCESSES[section], rest, own
        else:
            known_elsewhere = [other for other in _others(config_type) if field_type(other, name) is not None]
            reader = config_type if field_type(config_type, name) is not None else (known_elsewhere or [config_type])[0]
        _check_option(reader, name, value, variable)
        if reader is config_type:
            target[name] = Given(value, variable, text=True)
    return shared | own


def _is_process(config_type: type[msgspec.Struct]) -> bool:
    return any(known is config_type for known in PROCESSES.values())


def _others(config_type: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """The process kinds that may share a file or an environment with this one."""
    return [other for other in PROCESSES.values() if other is not config_type] if _is_process(config_type) else []


def _check_option(struct_type: type[msgspec.Struct], name: str, value: object, source: str) -> None:
    type_ = field_type(struct_type, name)
    if type_ is None:
        _raise_unknown(struct_type, name, value, source, "")
    if is_section(type_):
        fix = f"is a section: set one of its options, for example {name}.{type_.__struct_fields__[0]}"
        raise ConfigError(name, value, fix, source)


def _raise_unknown(struct_type: type[msgspec.Struct], name: str, value: object, source: str, prefix: str) -> None:
    known = list(option_names(struct_type, prefix))
    for other in _others(struct_type):
        known += [option for option in option_names(other) if option not in known]
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else "`kvcoord config` lists all options"
    raise ConfigError(name, value, f"unknown option; {hint}", source)


def _build(struct_type: type[Config], prefix: str, given: Mapping[str, Given]) -> Config:
    """Make a struct from the options below `prefix`, its sections first."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct_type):
        name = prefix + field.name
        if is_section(field.type):
            values[field.name] = _build(field.type, name + ".", given)
        elif name in given:
            values[field.name] = _convert(name, field.type, given[name])
        elif field.required:
            where = "" if "[" in name else f": set it in the file, as {variable_name(name)} or by a flag"
            raise ConfigError(name, None, "is required" + where)
    try:
        return struct_type(**values)
    except ConfigError as error:
        name = prefix + error.field
        source = given[name].source if name in given else "default"
        raise ConfigError(name, error.value, error.fix, source) from None


def _convert(name: str, type_: Any, given: Given) -> Any:
    item = item_section(type_)
    value = _from_text(type_, given.value) if given.text and isinstance(given.value, str) else given.value
    if item is not None and isinstance(value, list):
        return [_convert_item(item, f"{name}[{index}]", entry, given) for index, entry in enumerate(value)]
    try:
        return msgspec.convert(value, type_, strict=not given.text)
    except msgspec.ValidationError as error:
        raise ConfigError(name, given.value, misfit_text(type_, error), given.source) from None


def _convert_item(item: type[msgspec.Struct], name: str, entry: object, given: Given) -> msgspec.Struct:
    if isinstance(entry, item):
        return entry
    section = as_section(name, entry, given.source)
    return _build(item, name + ".", dict(_walk(item, section, given.source, name + ".")))


def _from_text(type_: Any, text: str) -> object:
    """What a variable or a flag says for an option: lists are written `a,b` or as YAML, null as nothing."""
    if is_optional(type_) and text.strip() in ("", "null"):
        return None
    if typing.get_origin(type_) is not list:
        return text
    if item_section(type_) is None and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",")]
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text
