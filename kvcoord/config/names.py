"""How an option is called in each place: `timeouts.vote_timeout_s` is `KVCOORD_TIMEOUTS__VOTE_TIMEOUT_S`."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

VARIABLE_PREFIX: Final = "KVCOORD_"


def variable_name(option: str) -> str:
    """The environment variable that sets a dotted option."""
    return VARIABLE_PREFIX + option.replace(".", "__").upper()


def option_name(variable: str) -> str:
    """The dotted option that an environment variable sets. Inverse of `variable_name`."""
    return variable.removeprefix(VARIABLE_PREFIX).replace("__", ".").lower()


def nearest(unknown: str, known: Sequence[str]) -> str:
    """The known option that `unknown` was most likely meant to be, empty when none is close.

    An option that is spelled right but stands in the wrong section counts as close.
    """
    last = unknown.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    close = elsewhere or get_close_matches(unknown, known, n=1)
    if not close:
        by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [by_last[match] for match in get_close_matches(last, list(by_last), n=1)]
    return close[0] if close else ""
