"""One source of option values: a file, the environment, flags. Reads names and raw values; converts nothing."""

import tomllib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvcoord.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where YAML's own loaders quietly take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is set twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> dict[str, object]:
    """The top-level mapping of a YAML or TOML file, by suffix.

    Raises:
        ConfigError: when the file cannot be read, is neither, or is no mapping.
    """
    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError("config file", str(path), "name a file that ends in .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if suffix == ".toml" else parse_yaml(text)
    except OSError as error:
        raise ConfigError("config file", str(path), f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config file", str(path), f"is not valid: {_one_line(error)}") from None
    return as_section("config file", content, str(path))


def parse_yaml(text: str) -> object:
    """The value that YAML text stands for. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_UniqueKeyLoader)


def as_section(name: str, content: object, source: str) -> dict[str, object]:
    """A mapping with text keys. Null, a section whose lines are all commented out, is an empty one.

    Raises:
        ConfigError: for anything that is not a mapping.
    """
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(name, content, "expected a section: one option a line below it", source)
    return {str(key): value for key, value in content.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
