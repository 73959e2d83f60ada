"""Bytes from a peer are a message or a typed error, and nothing else."""

import contextlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcoord.domain import OPERATION_ID_LENGTH_MAX, Agreement, OperationKind, Outcome, Reason
from kvcoord.errors import FrameError, FrameMalformed, FrameOversized, FrameVersionMismatch
from kvcoord.protocol.codec import Decoder, coordinator_decoder, encode, rank_decoder
from kvcoord.protocol.messages import (
    EPOCH_NUMBER_MAX,
    PROTOCOL_VERSION,
    Accept,
    Ack,
    Activate,
    Alive,
    Completion,
    Decision,
    Divergence,
    FetchEntries,
    Frame,
    FromCoordinator,
    FromRank,
    Heartbeat,
    Hello,
    Leave,
    LogRequest,
    Numbered,
    OperationLog,
    Prepare,
    Refused,
    Rejoin,
    Report,
    StatusReply,
    StatusRequest,
    StreamAck,
    StreamVote,
    Suspended,
    Verdict,
    Vote,
    Waiting,
    epoch_id,
)

EPOCH = epoch_id(3, 77)
VOTE = Vote("op", OperationKind.LOAD_BACK, False, Agreement.INTERSECT, 5, [b"a"], Reason.HOST_FULL, {"kv": 2})
DECISION = Decision("op", Outcome.ABORT, 4, None, Reason.HOST_FULL, 1, {"kv": 2})
COMPLETION = Completion("op", False, False, 5, Reason.COPY_FAILED, 1)
VERDICT = Verdict(EPOCH, 7, [DECISION], [COMPLETION], [3, 4], [2])
REPORT = Report(EPOCH, 5, [DECISION, COMPLETION], ["op2"], [VERDICT], 8, [COMPLETION], [1, 2], True)

FROM_RANK: list[FromRank] = [
    Hello(PROTOCOL_VERSION, "group", 1, 4, 9, 2, EPOCH, {"page_bytes": 4096, "dtype": "bf16"}),
    Accept(EPOCH, REPORT),
    Heartbeat(EPOCH, 5, 6),
    StreamVote(EPOCH, VOTE),
    StreamAck(EPOCH, Ack("op", False, Reason.COPY_FAILED, 3)),
    FetchEntries(EPOCH, 5),
    Leave(EPOCH),
    OperationLog(EPOCH, 7, [("commit op", 1 << 63)]),
    Frame(EPOCH, 7, [VOTE], [Ack("op", True)], [3, 4], (1 << 64) - 1, 6),
    StatusRequest(1),
]
FROM_COORDINATOR: list[FromCoordinator] = [
    Waiting(77, 2, [1, 3], 0),
    Refused("mismatch", "dtype", 1, "bf16", 0, "fp8"),
    Prepare(EPOCH, 2),
    Activate(EPOCH, EPOCH, [DECISION, COMPLETION], [VERDICT], [3, 4], 7),
    Alive(EPOCH, 77, 5, 6),
    Numbered(EPOCH, DECISION),
    Numbered(EPOCH, COMPLETION),
    VERDICT,
    Suspended(EPOCH, 1, "silent"),
    Rejoin(77),
    LogRequest(EPOCH, 7),
    Divergence(EPOCH, 7, [[0, 1], [2]], "commit op"),
    StatusReply(1, b"{}"),
]


def decoder_of(message: object) -> Decoder[FromRank] | Decoder[FromCoordinator]:
    return rank_decoder() if message in FROM_RANK else coordinator_decoder()


@pytest.mark.parametrize("message", [*FROM_RANK, *FROM_COORDINATOR], ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: msgspec.Struct) -> None:
    assert decoder_of(message).decode(encode(message)) == message


@pytest.mark.parametrize("message", [*FROM_RANK, *FROM_COORDINATOR], ids=lambda message: type(message).__name__)
def test_every_truncation_is_a_typed_error(message: msgspec.Struct) -> None:
    payload = encode(message)
    for length in range(len(payload)):
        with pytest.raises(FrameError):
            decoder_of(message).decode(payload[:length])


@given(st.sampled_from([*FROM_RANK, *FROM_COORDINATOR]), st.data())
def test_a_flipped_bit_gives_a_message_or_a_typed_error(message: msgspec.Struct, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    at = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[at // 8] ^= 1 << at % 8
    with contextlib.suppress(FrameError):
        decoder_of(message).decode(bytes(payload))


@given(st.binary(max_size=200))
@example(b"\x01" + b"\x91" * 100_000)
@example(b"\x01\xc1")
def test_random_bytes_give_a_message_or_a_typed_error(payload: bytes) -> None:
    for decoder in (rank_decoder(), coordinator_decoder()):
        for candidate in (payload, bytes((PROTOCOL_VERSION,)) + payload):
            with contextlib.suppress(FrameError):
                decoder.decode(candidate)


def test_what_is_too_long_is_not_decoded() -> None:
    payload = encode(FROM_RANK[0])
    assert rank_decoder(len(payload)).decode(payload) == FROM_RANK[0]
    with pytest.raises(FrameOversized):
        rank_decoder(len(payload) - 1).decode(payload)


def test_another_version_is_told_apart_from_garbage() -> None:
    payload = encode(FROM_RANK[0])
    with pytest.raises(FrameVersionMismatch, match="protocol version 0"):
        rank_decoder().decode(b"\x00" + payload[1:])


def test_each_side_reads_only_what_the_other_may_say() -> None:
    for message in FROM_COORDINATOR:
        with pytest.raises(FrameMalformed):
            rank_decoder().decode(encode(message))
    for said in FROM_RANK:
        with pytest.raises(FrameMalformed):
            coordinator_decoder().decode(encode(said))


LONG = "x" * (OPERATION_ID_LENGTH_MAX + 1)


@pytest.mark.parametrize(
    "message",
    [
        Frame(EPOCH, -1, [], [], [], 0),
        Frame(EPOCH, 1, [], [], [3, -1], 0),
        Frame(EPOCH, 1, [], [], [3], 0, 2),
        Frame(EPOCH, 1, [], [], [3], 0, -2),
        Frame(EPOCH, 1, [Vote("", OperationKind.CUSTOM, True)], [], [], 0),
        Frame(EPOCH, 1, [], [Ack(LONG, True)], [], 0),
        StreamVote(EPOCH, Vote(LONG, OperationKind.CUSTOM, True)),
        StreamVote(EPOCH, Vote("op", OperationKind.CUSTOM, True, participants=-1)),
        StreamVote(EPOCH, Vote("op", OperationKind.CUSTOM, False)),
        StreamAck(EPOCH, Ack("", True)),
        StreamAck(EPOCH, Ack("op", True, None, -1)),
        Hello(PROTOCOL_VERSION, "group", 0, 0, 1, 1, 0, {}),
        Hello(PROTOCOL_VERSION, "", 0, 1, 1, 1, 0, {}),
        Hello(PROTOCOL_VERSION, "group", 0, 1, 1, 1, -1, {}),
        Hello(PROTOCOL_VERSION, "group", 0, 1, 1, 1, epoch_id(EPOCH_NUMBER_MAX, 0), {}),
        Accept(EPOCH, msgspec.structs.replace(REPORT, sequence=-1, entries=[])),
        Accept(EPOCH, msgspec.structs.replace(REPORT, sequence=4)),
        Accept(EPOCH, msgspec.structs.replace(REPORT, free=[-1])),
        Accept(EPOCH, msgspec.structs.replace(REPORT, verdicts=[msgspec.structs.replace(VERDICT, round=-1)])),
    ],
    ids=repr,
)
def test_what_cannot_be_meant_is_malformed(message: FromRank) -> None:
    with pytest.raises(FrameMalformed):
        rank_decoder().decode(encode(message))
