"""Failures that travelled: from a `Failed` answer back to the exception that the worker raised. Pure."""

import msgspec

from kvcoord import errors
from kvcoord.errors import Diverged, GroupLost, GroupRenewed, JoinRefused, KvcoordError
from kvcoord.protocol.local import Failed

VOTES_END = (Diverged, GroupLost, GroupRenewed, JoinRefused)
"""The group is over, or began anew: nothing that was put to its vote before will be decided."""


def exception_of(failure: Failed) -> KvcoordError:
    """The exception of `kvcoord.errors` that `failure` names, with its fields.

    A name or fields that this release does not know make a plain KvcoordError of the same content.
    """
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, KvcoordError):
        try:
            return kind(*failure.fields)
        except TypeError:
            pass
    return KvcoordError(failure.error, *failure.fields)


def fresh(error: KvcoordError) -> KvcoordError:
    """The same error once more: each who waits raises one of its own, with a traceback of its own."""
    return type(error)(*error.args)


def name_of(call: msgspec.Struct) -> str:
    """A call as a user knows it: `write_through` for WriteThrough."""
    name = type(call).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
