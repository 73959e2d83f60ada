"""kvcoord keeps the KV caches of a multi-GPU model server equal on every rank.

The names a user needs are here: `connect` and `connect_blocking` (the client), `token_page_keys`, and the outcomes.
They are loaded when first used: importing this package never imports torch, numpy or zmq. `__init__.pyi` has their
types.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "Aborted": "kvcoord.domain",
    "Committed": "kvcoord.domain",
    "connect": "kvcoord.client",
    "connect_blocking": "kvcoord.client",
    "token_page_keys": "kvcoord.index.keys",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
