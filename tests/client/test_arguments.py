"""What a user passes is refused before it travels, naming the argument, its value and the fix."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.client import arguments
from kvcoord.domain import Agreement, Reason, Tier
from kvcoord.errors import UsageError
from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import Agree, Calls, FromEngine, split_keys
from tests.client.values import HYBRID, INFO, TWO_POOLS, A, B


def vote(**fields: object) -> Agree:
    arguments_of: dict[str, object] = {"deferred": False} | fields
    operation, yes = arguments_of.pop("operation", "op/1"), arguments_of.pop("yes", True)
    return arguments.agree_of(INFO, operation, yes, **arguments_of)  # type: ignore[arg-type]


BAD: list[tuple[str, Callable[[], object]]] = [
    ("page_keys", lambda: arguments.keys_of([])),
    ("page_keys", lambda: arguments.keys_of([A, b"short"])),
    ("page_keys", lambda: arguments.keys_of([bytes(15), bytes(17)])),
    ("page_keys", lambda: arguments.keys_of(A)),  # type: ignore[arg-type]
    ("page_keys", lambda: arguments.keys_of(["k" * 16])),  # type: ignore[list-item]
    ("page_keys", lambda: arguments.keys_of(None)),  # type: ignore[arg-type]
    ("device_slots", lambda: arguments.slots_of([16], INFO)),
    ("device_slots", lambda: arguments.slots_of([-1], INFO)),
    ("device_slots", lambda: arguments.slots_of(["1"], INFO)),  # type: ignore[arg-type]
    ("device_slots", lambda: arguments.slots_of([True], INFO)),
    ("device_slots", lambda: arguments.slots_of(7, INFO)),  # type: ignore[arg-type]
    ("device_slots", lambda: arguments.slots_of([[1], [2]], INFO)),
    ("device_slots", lambda: arguments.slots_of([1, 2], TWO_POOLS)),
    ("device_slots", lambda: arguments.slots_of([], TWO_POOLS)),
    ("device_slots", lambda: arguments.slots_of([[1, 2], [3]], TWO_POOLS)),
    ("device_slots", lambda: arguments.slots_of([1, 2], INFO, 1)),
    ("device_slots", lambda: arguments.slots_of([[1, 2], [4]], HYBRID)),
    ("count", lambda: arguments.count_of("count", -1, "fix")),
    ("count", lambda: arguments.count_of("count", 2**60, "fix")),
    ("count", lambda: arguments.count_of("count", 1.0, "fix")),  # type: ignore[arg-type]
    ("tier", lambda: arguments.tier_of("L2")),
    ("operation", lambda: arguments.operation_of("x" * 129)),
    ("operation", lambda: arguments.operation_of("", needed=True)),
    ("operation", lambda: vote(operation="")),
    ("agreement", lambda: vote(agreement="most")),
    ("value", lambda: vote(value=3)),
    ("value", lambda: vote(agreement="min", value=None)),
    ("value", lambda: vote(agreement="max", value=2**63)),
    ("value", lambda: vote(agreement="equal", value="x")),
    ("value", lambda: vote(agreement="intersect", value=[1])),
    ("value", lambda: vote(agreement="intersect", value=4)),
    ("participants", lambda: vote(participants=[4])),
    ("participants", lambda: vote(participants=[-1])),
    ("reason", lambda: vote(reason="busy")),
    ("reason", lambda: vote(yes=False, reason="tired")),
    ("shortfall", lambda: vote(yes=False, shortfall={"kv": -1})),
]


@pytest.mark.parametrize(("field", "bad"), BAD, ids=[f"{number}-{field}" for number, (field, _) in enumerate(BAD)])
def test_what_can_never_work_is_refused_by_name_with_the_fix(field: str, bad: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        bad()
    assert caught.value.field == field
    assert caught.value.fix


def test_slots_of_one_pool_may_be_a_plain_list() -> None:
    assert arguments.slots_of([1, 2], INFO) == [[1, 2]]
    assert arguments.slots_of([[1, 2]], INFO) == [[1, 2]]
    assert arguments.slots_of((1, 2), INFO) == [[1, 2]]
    assert arguments.slots_of([], INFO) == [[]]
    assert arguments.slots_of([[1, 2], (3, 4)], TWO_POOLS) == [[1, 2], [3, 4]]
    assert arguments.slots_of([[1, 2, 15], [3]], HYBRID) == [[1, 2, 15], [3]]


def test_slots_are_copied_so_that_the_caller_may_change_its_own() -> None:
    mine = [1, 2]
    slots = arguments.slots_of(mine, INFO)
    mine.append(3)
    assert slots == [[1, 2]]


def test_a_vote_says_who_takes_part_and_a_no_says_why() -> None:
    no = vote(yes=False, agreement="min", value=7, participants=[0, 3], reason="host_full", shortfall={"kv": 2})
    assert no == Agree("op/1", False, Agreement.MIN, 0b1001, None, Reason.HOST_FULL, {"kv": 2}, False)
    yes = vote(agreement=Agreement.INTERSECT, value=(A, B), deferred=True)
    assert yes == Agree("op/1", True, Agreement.INTERSECT, 0, [A, B], None, {}, True)


def test_tiers_are_named_by_the_enum_or_its_value() -> None:
    assert arguments.tier_of("host") is arguments.tier_of(Tier.HOST) is Tier.HOST


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=6), st.lists(st.integers(0, 15), max_size=6))
def test_what_is_let_through_can_be_read_by_a_worker(keys: list[bytes], slots: list[int]) -> None:
    call = arguments.write_of(INFO, keys, slots[: len(keys)], "op", False)
    decoder: Decoder[FromEngine] = Decoder(FromEngine)
    assert decoder.decode(encode(Calls([(1, call)]))).calls == [(1, call)]
    assert split_keys(call.keys) == keys


@given(st.lists(st.binary(max_size=20), max_size=4))
def test_no_key_of_another_length_gets_through(keys: list[bytes]) -> None:
    if keys and all(len(key) == 16 for key in keys):
        assert split_keys(arguments.keys_of(keys)) == keys
    else:
        with pytest.raises(UsageError):
            arguments.keys_of(keys)
