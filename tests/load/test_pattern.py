"""Page patterns: a page is known by its bytes."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.errors import UsageError
from kvcoord.load.pattern import page_bytes, verify

KEY = bytes(range(16))
OTHER_KEY = bytes(range(1, 17))

PLACES = list(product((KEY, OTHER_KEY), (0, 1, 256), (0, 1, 256), ("kv", "k", "indexer")))


def test_pages_that_differ_in_key_layer_rank_or_pool_differ_in_bytes() -> None:
    pages = [page_bytes(*place, 64) for place in PLACES]
    assert all(one != other for one, other in combinations(pages, 2))


@pytest.mark.parametrize("size", [0, 1, 60, 61, 62, 4096])
def test_a_page_has_the_size_asked_for_and_smaller_ones_are_its_prefixes(size: int) -> None:
    page = page_bytes(KEY, 3, 1, "kv", size)
    assert len(page) == size
    assert page_bytes(KEY, 3, 1, "kv", 10_000)[:size] == page


def test_the_bytes_are_the_same_in_every_process_and_release() -> None:
    assert page_bytes(KEY, 3, 1, "kv", 8).hex() == "6083168e0c47f9e7"


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(UsageError, match="size=-1"):
        page_bytes(KEY, 0, 0, "kv", -1)


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda page: memoryview(bytearray(page)).cast("B", (64, 64))])
def test_any_buffer_with_the_right_bytes_is_verified(kind: type[bytes]) -> None:
    view = kind(page_bytes(KEY, 3, 1, "kv", 4096))
    assert verify(view, KEY, 3, 1, "kv")
    assert not verify(view, OTHER_KEY, 3, 1, "kv")
    assert not verify(view, KEY, 4, 1, "kv")
    assert not verify(view, KEY, 3, 0, "kv")
    assert not verify(view, KEY, 3, 1, "indexer")


@given(st.integers(0, 4095), st.integers(1, 255))
def test_one_wrong_byte_anywhere_is_seen(at: int, change: int) -> None:
    page = bytearray(page_bytes(KEY, 3, 1, "kv", 4096))
    page[at] ^= change
    assert not verify(page, KEY, 3, 1, "kv")


@given(st.integers(4, 15).map(lambda exponent: 1 << exponent), st.integers(16, 4096))
def test_a_copy_at_a_wrong_offset_is_seen(shift: int, size: int) -> None:
    whole = page_bytes(KEY, 3, 1, "kv", shift + size)
    assert not verify(whole[shift:], KEY, 3, 1, "kv")
