"""Messages to bytes and back: one version byte, then msgpack. Strict: what is not a message is a typed error.

The decoder checks length, version and every field's type; `checked` adds the ranges that types cannot say. It
never executes or allocates anything in proportion to more than the frame's own size.
"""

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from kvcoord.domain import OPERATION_ID_LENGTH_MAX
from kvcoord.errors import FrameMalformed, FrameOversized, FrameVersionMismatch
from kvcoord.protocol.messages import (
    EPOCH_NUMBER_MAX,
    PROTOCOL_VERSION,
    Accept,
    Ack,
    Frame,
    FromCoordinator,
    FromRank,
    Hello,
    Report,
    StreamAck,
    StreamVote,
    Vote,
    epoch_number,
)

_COPIED_BYTES: Final = 1024
"""A copy of less than that costs less than a view."""

_VERSION_BYTE: Final = bytes((PROTOCOL_VERSION,))
_ENCODER: Final = msgspec.msgpack.Encoder()

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Default of `message_bytes_max`: a frame longer than this is not decoded."""

T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """One message as bytes."""
    return _VERSION_BYTE + _ENCODER.encode(message)


class Decoder(Generic[T]):
    """Bytes to one of the messages of `union`.

    Raises FrameOversized, FrameVersionMismatch or FrameMalformed; nothing else.
    """

    def __init__(self, union: object, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._bytes_max = message_bytes_max

    def decode(self, payload: bytes) -> T:
        size = len(payload)
        if size > self._bytes_max:
            raise FrameOversized(f"longer than message_bytes_max={self._bytes_max}", size)
        if size < 2:
            raise FrameMalformed("truncated", size)
        if payload[0] != PROTOCOL_VERSION:
            raise FrameVersionMismatch(f"protocol version {payload[0]}, spoken here is {PROTOCOL_VERSION}", size)
        try:
            message = self._decoder.decode(payload[1:] if size < _COPIED_BYTES else memoryview(payload)[1:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise FrameMalformed(str(error), size) from None
        check = _CHECKS.get(type(message))
        cause = "" if check is None else check(message)
        if cause:
            raise FrameMalformed(cause, size)
        return message


def rank_decoder(message_bytes_max: int = MESSAGE_BYTES_MAX) -> Decoder[FromRank]:
    """What a coordinator reads."""
    return Decoder(FromRank, message_bytes_max)


def coordinator_decoder(message_bytes_max: int = MESSAGE_BYTES_MAX) -> Decoder[FromCoordinator]:
    """What a rank reads."""
    return Decoder(FromCoordinator, message_bytes_max)


def _hello_out_of_range(hello: Hello) -> str:
    if hello.world_size <= 0:
        return f"world size {hello.world_size} is not positive"
    if not 0 <= epoch_number(hello.epoch) < EPOCH_NUMBER_MAX:
        return f"epoch {hello.epoch} cannot be"
    if not 0 < len(hello.group) <= OPERATION_ID_LENGTH_MAX:
        return f"group name of {len(hello.group)} characters, allowed are 1 to {OPERATION_ID_LENGTH_MAX}"
    return ""


def _frame_out_of_range(frame: Frame) -> str:
    if frame.round < 0:
        return f"round {frame.round} is negative"
    if not -1 <= frame.first_round <= frame.round:
        return f"first round {frame.first_round} cannot be that of frame {frame.round}"
    for free in frame.free:
        if free < 0:
            return f"free count {free} is negative"
    for vote in frame.votes:
        if not 0 < len(vote.operation) <= OPERATION_ID_LENGTH_MAX or vote.participants < 0 or not vote.yes:
            cause = _vote_out_of_range(vote)
            if cause:
                return cause
    for ack in frame.acks:
        cause = _ack_out_of_range(ack)
        if cause:
            return cause
    return ""


def _stream_vote_out_of_range(message: StreamVote) -> str:
    vote = message.vote
    if not 0 < len(vote.operation) <= OPERATION_ID_LENGTH_MAX or vote.participants < 0 or not vote.yes:
        return _vote_out_of_range(vote)
    return ""


def _vote_out_of_range(vote: Vote) -> str:
    if not 0 < len(vote.operation) <= OPERATION_ID_LENGTH_MAX:
        return f"operation id of {len(vote.operation)} characters, allowed are 1 to {OPERATION_ID_LENGTH_MAX}"
    if vote.participants < 0:
        return f"participants mask {vote.participants} is negative"
    if not vote.yes and vote.reason is None:
        return f"vote no without a reason for {vote.operation}"
    return ""


def _ack_out_of_range(ack: Ack) -> str:
    if not 0 < len(ack.operation) <= OPERATION_ID_LENGTH_MAX:
        return f"operation id of {len(ack.operation)} characters, allowed are 1 to {OPERATION_ID_LENGTH_MAX}"
    if ack.participants < 0:
        return f"participants mask {ack.participants} is negative"
    return ""


def _report_out_of_range(report: Report) -> str:
    if report.sequence < 0 or any(not 0 < entry.sequence <= report.sequence for entry in report.entries):
        return f"entries do not fit sequence {report.sequence}"
    if any(verdict.round < 0 for verdict in report.verdicts):
        return "a verdict's round is negative"
    if any(free < 0 for free in report.free):
        return "a free count is negative"
    return ""


_CHECKS: Final[dict[type, Callable[[Any], str]]] = {
    Frame: _frame_out_of_range,
    StreamVote: _stream_vote_out_of_range,
    StreamAck: lambda message: _ack_out_of_range(message.ack),
    Accept: lambda message: _report_out_of_range(message.report),
    Hello: _hello_out_of_range,
}
"""By message: why it cannot be meant, or an empty string. Types are already right there."""
