"""The shape of a pool's bytes: how many layers, how many bytes a page has in each.

It does not know where the bytes are nor which pages are in use.
"""

from typing import Annotated

import msgspec

from kvcoord.domain import PoolName
from kvcoord.errors import ConfigError

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
"""A count that a peer's message may not send as zero or less."""


class PoolGeometry(msgspec.Struct, frozen=True):
    """One pool's pages. Equal on all ranks that share a pool's layers; the capacity may differ.

    `page_bytes` is one page in ONE layer. `dtype` is a label that ranks compare, never interpreted here.
    Raises ConfigError when a field can never work.
    """

    name: PoolName
    layer_count: AtLeastOne
    page_bytes: AtLeastOne
    dtype: str

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

    def total_bytes(self, capacity: int) -> int:
        """Bytes of `capacity` pages over all layers. Raises ConfigError below one page."""
        if capacity < 1:
            raise ConfigError(f"pools.{self.name}.capacity", capacity, "a pool holds at least one page")
        return self.layer_count * capacity * self.page_bytes
