"""Chained page keys: the key of a page stands for that page and for all pages before it.

A key is BLAKE2b (16 bytes, personalised) over the parent's key and the page's payload, so it is the same in every
process, on every rank and after every restart. The interpreter's own `hash` is never used. Knows nothing of tiers.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

from kvcoord.domain import PAGE_KEY_BYTES, PageKey
from kvcoord.errors import UsageError

ROOT: Final[PageKey] = bytes(PAGE_KEY_BYTES)
"""The parent of every first page."""

_PERSON: Final = b"kvcoord-page-1"
_TOKEN_BYTES: Final = 8


def page_key(parent: PageKey, payload: bytes) -> PageKey:
    """The key of the page with `payload` after the page `parent` (`ROOT` for a first page).

    Raises UsageError when `parent` is not a page key.
    """
    return page_keys((payload,), parent)[0]


def page_keys(payloads: Iterable[bytes], root: PageKey = ROOT) -> list[PageKey]:
    """One key for each payload, each chained to the one before, the first to `root`.

    Raises UsageError when `root` is not a page key.
    """
    if len(root) != PAGE_KEY_BYTES:
        raise UsageError("parent", root, f"a page key has {PAGE_KEY_BYTES} bytes")
    keys = []
    parent = root
    for payload in payloads:
        parent = blake2b(parent + payload, digest_size=PAGE_KEY_BYTES, person=_PERSON).digest()
        keys.append(parent)
    return keys


def token_page_keys(tokens: Sequence[int], page_tokens: int) -> list[PageKey]:
    """The keys of the full pages of `tokens`; tokens after the last full page have no key.

    A token is 8 bytes, little-endian, signed. Raises UsageError for a token outside that range or `page_tokens` < 1.
    """
    if page_tokens < 1:
        raise UsageError("page_tokens", page_tokens, "a page holds at least one token")
    page_count = len(tokens) // page_tokens
    packed = _packed("q", tokens[: page_count * page_tokens], "tokens")
    page_bytes = page_tokens * _TOKEN_BYTES
    return page_keys(packed[start : start + page_bytes] for start in range(0, len(packed), page_bytes))


def block_page_keys(hash_ids: Sequence[int]) -> list[PageKey]:
    """The keys of a trace's prefix blocks: the payload of a page is its id, 8 bytes, little-endian, unsigned.

    Raises UsageError for an id outside that range.
    """
    packed = _packed("Q", hash_ids, "hash_ids")
    return page_keys(packed[start : start + _TOKEN_BYTES] for start in range(0, len(packed), _TOKEN_BYTES))


def self_test_digest() -> str:
    """A hex digest over the keys of a fixed example. Ranks whose digests differ would never find each other's pages."""
    by_payload = page_keys((b"", b"\x00", b"kvcoord", bytes(range(256))))
    by_token = token_page_keys((0, 1, -1, 151_643, 2**31, 2**63 - 1, 7), 2)
    by_block = block_page_keys((0, 1, 2**64 - 1))
    return blake2b(b"".join(by_payload + by_token + by_block), digest_size=PAGE_KEY_BYTES, person=_PERSON).hexdigest()


def _packed(code: str, values: Sequence[int], field: str) -> bytes:
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except struct.error as error:
        raise UsageError(field, "a value out of range", f"each must fit 8 bytes ({error})") from error
