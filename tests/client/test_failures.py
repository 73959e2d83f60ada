"""What the worker raised is raised at the engine: the same class, the same fields, the same sentence."""

import pytest

from kvcoord import errors
from kvcoord.client.failures import exception_of, fresh, name_of
from kvcoord.errors import ConfigError, KvcoordError, UsageError
from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import Acquire, Answers, Failed, FromWorker, WriteThrough, failed

RAISED: list[KvcoordError] = [
    errors.UsageError("lease", 3, "is not held"),
    errors.ConfigError("page_bytes", 7, "make it even"),
    errors.JoinRefused("g", "mismatch", "page_bytes", 1, "64", 0, "128"),
    errors.GroupLost("g", "rank 2 is missing", 60.0),
    errors.GroupRenewed("g", "rank 2 left"),
    errors.Diverged("g", 17, [[0, 1], [2]], "write-through/4/0"),
    errors.DeadlineExceeded("vote", "vote_timeout_s", 5.0),
    errors.PeerUnavailable("ipc:///x", "closed"),
    errors.TransferFailed("load-back/1/0", 2, "boom"),
    errors.LoadRetracted("load-back/1/0", "copy_failed", 2),
    errors.DriverCallFailed("cuMemcpyAsync", 700, "illegal address"),
    errors.FrameError("truncated", 3),
    errors.FrameOversized("too long", 9),
    errors.FrameMalformed("truncated", 1),
    errors.FrameVersionMismatch("version 9", 20),
    errors.PoolError("kv", 3, "engine", "index"),
    errors.SlotNotAllocated("kv", 3, "engine", "nobody"),
    errors.SlotFreedTwice("kv", 3, "engine", "index"),
    errors.SlotOwnerMismatch("kv", 3, "engine", "index"),
    errors.SlotStateMismatch("kv", 3, "engine", "reserved"),
    errors.InvariantBroken("conservation", "one page too many"),
]


def test_every_class_of_errors_is_tried_here() -> None:
    known = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KvcoordError)}
    assert {type(error) for error in RAISED} | {KvcoordError} == known


def travelled(failure: Failed) -> Failed:
    decoder: Decoder[FromWorker] = Decoder(FromWorker)
    message = decoder.decode(encode(Answers([(1, failure)])))
    assert isinstance(message, Answers)
    ((_, answer),) = message.answers
    assert isinstance(answer, Failed)
    return answer


@pytest.mark.parametrize("error", RAISED, ids=[type(error).__name__ for error in RAISED])
def test_an_error_arrives_as_it_was_raised(error: KvcoordError) -> None:
    fields = list(error.args) if isinstance(error, errors.Diverged) else failed(error).fields
    arrived = exception_of(travelled(Failed(type(error).__name__, fields)))
    assert type(arrived) is type(error)
    assert arrived.args == error.args
    assert str(arrived) == str(error)


@pytest.mark.parametrize("error", RAISED, ids=[type(error).__name__ for error in RAISED])
def test_everybody_who_waits_raises_an_error_of_his_own(error: KvcoordError) -> None:
    again = fresh(error)
    assert again is not error
    assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))


@pytest.mark.parametrize(
    "failure",
    [
        Failed("SomethingNew", ["x", 1]),
        Failed("Sequence", ["a typing name of that module"]),
        Failed("__doc__", []),
        Failed("GroupLost", ["too few fields"]),
        Failed("UsageError", ["field", 1, "fix", "one too many"]),
    ],
)
def test_what_this_release_does_not_know_is_a_plain_error_with_all_that_was_said(failure: Failed) -> None:
    arrived = exception_of(failure)
    assert type(arrived) is KvcoordError
    assert arrived.args == (failure.error, *failure.fields)


def test_a_config_error_is_also_a_usage_error_on_this_side() -> None:
    arrived = exception_of(failed(ConfigError("page_bytes", 7, "make it even", "a file")))
    assert isinstance(arrived, UsageError)
    assert arrived.field == "page_bytes"


def test_calls_are_named_as_a_user_knows_them() -> None:
    assert name_of(Acquire(b"")) == "acquire"
    assert name_of(WriteThrough()) == "write_through"
