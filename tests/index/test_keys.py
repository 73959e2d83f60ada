import subprocess
import sys

import pytest

from kvcoord.domain import PAGE_KEY_BYTES
from kvcoord.errors import UsageError
from kvcoord.index.keys import ROOT, block_page_keys, page_key, page_keys, self_test_digest, token_page_keys

SELF_TEST_DIGEST = "d0b2e197f8fe894b31077b315ff06f6e"


def test_a_key_stands_for_its_page_and_all_pages_before_it() -> None:
    one = page_keys([b"a", b"b", b"c"])
    other = page_keys([b"x", b"b", b"c"])
    assert not set(one) & set(other)
    assert page_keys([b"a", b"b"]) == one[:2]
    assert page_keys([b"c"], root=one[1]) == one[2:]
    assert page_key(one[1], b"c") == one[2]
    assert page_key(ROOT, b"a") == one[0]
    assert {len(key) for key in one} == {PAGE_KEY_BYTES}


def test_only_full_pages_of_tokens_have_keys() -> None:
    tokens = list(range(11))
    keys = token_page_keys(tokens, 4)
    assert len(keys) == 2
    assert token_page_keys(tokens[:8], 4) == keys
    assert token_page_keys(tokens[:3], 4) == []
    assert token_page_keys([*tokens[:7], 99], 4)[0] == keys[0]
    assert token_page_keys([*tokens[:7], 99], 4)[1] != keys[1]


def test_a_token_page_is_the_tokens_as_eight_little_endian_bytes() -> None:
    payload = (5).to_bytes(8, "little") + (-1).to_bytes(8, "little", signed=True)
    assert token_page_keys([5, -1], 2) == page_keys([payload])


def test_a_block_page_is_its_id_as_eight_little_endian_bytes() -> None:
    assert block_page_keys([7, 2**64 - 1]) == page_keys([(7).to_bytes(8, "little"), b"\xff" * 8])


@pytest.mark.parametrize("tokens", [[2**63], [-(2**63) - 1]])
def test_a_token_that_does_not_fit_is_a_usage_error(tokens: list[int]) -> None:
    with pytest.raises(UsageError) as caught:
        token_page_keys(tokens, 1)
    assert caught.value.field == "tokens"


def test_a_negative_block_id_an_empty_page_and_a_short_parent_are_usage_errors() -> None:
    with pytest.raises(UsageError) as caught:
        block_page_keys([-1])
    assert caught.value.field == "hash_ids"
    with pytest.raises(UsageError) as caught:
        token_page_keys([1], 0)
    assert caught.value.field == "page_tokens"
    with pytest.raises(UsageError) as caught:
        page_key(b"short", b"a")
    assert caught.value.field == "parent"


def test_the_self_test_digest_is_the_one_that_every_release_has_had() -> None:
    assert self_test_digest() == SELF_TEST_DIGEST


def test_keys_do_not_depend_on_the_hash_seed_of_the_interpreter() -> None:
    program = "from kvcoord.index.keys import self_test_digest as digest; print(digest(), hash('kvcoord'))"
    answers = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert answers[0][1] != answers[1][1]
    assert [digest for digest, _ in answers] == [SELF_TEST_DIGEST, SELF_TEST_DIGEST]
