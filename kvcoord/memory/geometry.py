"""The shape of a pool's bytes: how many layers, how many bytes a page has in each, and in which order they lie.

A page has in each layer one or several *parts* of equal size: two where keys and values lie apart (MHA, GQA), one
where they are a single latent (MLA). One part of one layer is a *plane*: the unit in which bytes are contiguous, with
one piece of `plane_bytes` for every page. It does not know where the bytes are nor which pages are in use.
"""

from typing import Annotated

import msgspec

from kvcoord.domain import Layout, PoolName
from kvcoord.errors import ConfigError

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
"""A count that a peer's message may not send as zero or less."""


class PoolGeometry(msgspec.Struct, frozen=True):
    """One pool's pages. Equal on all ranks that share a pool's layers; the capacity may differ.

    `page_bytes` is one page in ONE layer, all `parts` of it. `dtype` is a label that ranks compare, never interpreted
    here. Raises ConfigError when a field can never work.
    """

    name: PoolName
    layer_count: AtLeastOne
    page_bytes: AtLeastOne
    dtype: str
    parts: AtLeastOne = 1

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise ConfigError("pools.name", self.name, "give every pool a name of printable characters")
        field = f"pools.{self.name}"
        if self.layer_count < 1:
            raise ConfigError(f"{field}.layer_count", self.layer_count, "a pool has at least one layer")
        if self.page_bytes < 1:
            raise ConfigError(f"{field}.page_bytes", self.page_bytes, "a page has at least one byte in each layer")
        if not self.dtype:
            raise ConfigError(f"{field}.dtype", self.dtype, "name the element type, for example bfloat16")
        if self.parts < 1 or self.page_bytes % self.parts:
            raise ConfigError(f"{field}.parts", self.parts, f"must divide page_bytes={self.page_bytes} evenly")

    @property
    def plane_bytes(self) -> int:
        """Bytes of one page in one plane."""
        return self.page_bytes // self.parts

    @property
    def plane_count(self) -> int:
        return self.layer_count * self.parts

    @property
    def whole_page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.layer_count * self.page_bytes

    def total_bytes(self, capacity: int) -> int:
        """Bytes of `capacity` pages over all layers. Raises ConfigError below one page."""
        if capacity < 1:
            raise ConfigError(f"pools.{self.name}.capacity", capacity, "a pool holds at least one page")
        return self.whole_page_bytes * capacity

    def strides(self, capacity: int, layout: Layout) -> tuple[int, int]:
        """Bytes from a page's piece in one plane to its piece in the next plane, and to the next page's piece."""
        if layout is Layout.PAGE_FIRST:
            return self.plane_bytes, self.whole_page_bytes
        return capacity * self.plane_bytes, self.plane_bytes
