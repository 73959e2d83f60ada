"""What each option is: type, default, variable and docstring, read from the structs themselves."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator

import msgspec

from kvcoord.config.fields import is_section, item_section, type_text
from kvcoord.config.names import variable_name


class Option(msgspec.Struct, frozen=True):
    """One option as a user sees it. `default` is YAML-like text, empty when the option is required.

    `name` is dotted; options of list items read `pools[].name` and have no `variable`.
    """

    name: str
    type: str
    default: str
    variable: str
    description: str


def explain(config_type: type[msgspec.Struct]) -> list[Option]:
    """Every option of a configuration struct and of its sections, in order of declaration."""
    return list(_options(config_type, ""))


def _options(struct_type: type[msgspec.Struct], prefix: str) -> Iterator[Option]:
    descriptions = field_docstrings(struct_type)
    for field in msgspec.structs.fields(struct_type):
        if is_section(field.type):
            yield from _options(field.type, f"{prefix}{field.name}.")
            continue
        name = prefix + field.name
        yield Option(
            name=name,
            type=type_text(field.type),
            default=_default_text(field),
            variable="" if "[]" in name else variable_name(name),
            description=descriptions.get(field.name, ""),
        )
        item = item_section(field.type)
        if item is not None:
            yield from _options(item, name + "[].")


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(default).decode().strip('"')


@functools.cache
def field_docstrings(struct_type: type[msgspec.Struct]) -> dict[str, str]:
    """The string literal below each field of a class, by field name, on one line."""
    (class_definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct_type))).body
    assert isinstance(class_definition, ast.ClassDef)
    docstrings: dict[str, str] = {}
    field = ""
    for statement in class_definition.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                field = name
            case ast.Expr(value=ast.Constant(value=str(text))) if field:
                docstrings[field] = " ".join(text.split())
                field = ""
            case _:
                field = ""
    return docstrings
