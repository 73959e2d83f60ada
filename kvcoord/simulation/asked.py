"""What an engine has asked its worker, until it is answered."""

from collections.abc import Callable

import msgspec

from kvcoord.protocol.local import Answer, Call

Heard = Callable[[Answer], None]


class Asked(msgspec.Struct, frozen=True):
    """A call without an answer: the how-manieth of its step, when it was made, what to do with the answer."""

    call: Call
    index: int
    at_s: float
    heard: Heard
