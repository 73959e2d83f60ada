"""What all ranks of a group must have in common: its shape, its pages, its policies."""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from kvcoord.config.fields import Count, PositiveInt, check_fields
from kvcoord.domain import DivergencePolicy, WritePolicy
from kvcoord.errors import ConfigError

Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\\Z")]
"""Names travel in messages and label metrics: short, printable, no spaces."""


class EvictionPolicy(StrEnum):
    """Which published, unpinned page goes first."""

    LRU = "lru"
    LFU = "lfu"
    PRIORITY = "priority"


class AgreementMode(StrEnum):
    """Whether the ranks agree at all. `none` is there to show what happens without."""

    KVCOORD = "kvcoord"
    NONE = "none"


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of page data that every page of the group has: the KV cache, a side index, a state."""

    name: Name
    """Name of the pool; the first pool of a group holds the KV cache."""

    page_bytes: PositiveInt
    """Bytes of one page in one layer on one rank, all its parts."""

    layers: PositiveInt
    """Layers of this pool on one rank."""

    dtype: Name = "bfloat16"
    """Element type, compared at join and never interpreted."""

    parts: PositiveInt = 1
    """Equal parts that a page has in each layer: 2 where keys and values lie apart, 1 where they are one latent."""

    stage_layers: list[Count] = []
    """Layers of this pool on each pipeline stage, where they differ; a stage may have none. Empty: the same on all."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.page_bytes % self.parts:
            raise ConfigError(f"pools.{self.name}.parts", self.parts, f"must divide page_bytes={self.page_bytes}")

    def layers_of_stage(self, stage: int) -> int:
        """Layers on the ranks of one pipeline stage, 0 for none."""
        return self.stage_layers[stage] if self.stage_layers else self.layers


_DEFAULT_POOL: Final = PoolConfig(name="kv", page_bytes=16384, layers=4)


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that must agree, and what they must have in common.

    Zeros that mean "derived" are replaced when the struct is made: readers see final numbers.
    """

    name: Name = "default"
    """Name of the group; ranks with the same name belong together."""

    world_size: Count = 0
    """Ranks in the group: tp x pp x cp. 0: derived from these."""

    tp: Count = 0
    """Tensor-parallel ranks. 0: world_size / (pp x cp)."""

    pp: PositiveInt = 1
    """Pipeline stages."""

    cp: PositiveInt = 1
    """Context-parallel ranks."""

    lag: Count = 0
    """Rounds between a frame and the step that applies its verdict, at least pp. 0: pp."""

    lockstep: bool = True
    """Whether the engines run in lockstep and call advance at every step. False: operations are voted one by one."""

    page_tokens: PositiveInt = 64
    """Tokens of one page."""

    pools: list[PoolConfig] = msgspec.field(default_factory=lambda: [_DEFAULT_POOL])
    """Pools of which every page takes one slot each, all or none."""

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    """When pages are copied to the host: at once, after some hits, or when they leave the device."""

    write_hits_min: PositiveInt = 2
    """Hits after which write-through-selective copies a page."""

    eviction: EvictionPolicy = EvictionPolicy.LRU
    """Order in which pages are evicted; ties end with the page key."""

    divergence: DivergencePolicy = DivergencePolicy.STOP
    """What follows when the ranks' digests differ: stop the group, or warn and go on."""

    agreement: AgreementMode = AgreementMode.KVCOORD
    """kvcoord, or none to see ranks that decide alone diverge. Never none in production."""

    def __post_init__(self) -> None:
        check_fields(self)
        force = msgspec.structs.force_setattr
        outer = self.pp * self.cp
        if not self.tp:
            force(self, "tp", max(1, self.world_size // outer))
        if not self.world_size:
            force(self, "world_size", self.tp * outer)
        if not self.lag:
            force(self, "lag", self.pp)
        self._check_shape()
        self._check_streaming()
        self._check_pools()

    def _check_shape(self) -> None:
        product = self.tp * self.pp * self.cp
        if self.world_size != product:
            fix = f"must be tp x pp x cp = {self.tp} x {self.pp} x {self.cp} = {product}"
            raise ConfigError("world_size", self.world_size, fix)
        if self.lag < self.pp:
            raise ConfigError(
                "lag", self.lag, f"must be at least pp={self.pp}: that is how far pipeline stages run apart"
            )

    def _check_streaming(self) -> None:
        if self.lockstep:
            return
        if self.write_policy is not WritePolicy.WRITE_THROUGH:
            fix = "without lockstep the engine says what is written: use write-through"
            raise ConfigError("write_policy", self.write_policy.value, fix)
        if self.agreement is AgreementMode.NONE:
            raise ConfigError("agreement", self.agreement.value, "shows divergence in lockstep only: set lockstep=true")

    def _check_pools(self) -> None:
        names = [pool.name for pool in self.pools]
        if not names:
            raise ConfigError("pools", [], "must name at least one pool")
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("pools", names, f"pool {name!r} is listed twice: give each pool its own name")
        for pool in self.pools:
            if pool.stage_layers and len(pool.stage_layers) != self.pp:
                fix = f"must name the layers of each of the pp={self.pp} pipeline stages, or be empty"
                raise ConfigError(f"pools.{pool.name}.stage_layers", pool.stage_layers, fix)

        for stage in range(self.pp):
            if not any(pool.layers_of_stage(stage) for pool in self.pools):
                raise ConfigError("pools.stage_layers", stage, "this pipeline stage has no layer of any pool")

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank: the ranks of a stage are neighbours."""
        return rank // (self.world_size // self.pp)


def group_fingerprint(group: GroupConfig) -> dict[str, str | int]:
    """What all ranks must configure alike, by option name: the join compares these and names the first that differs.

    Pool sizes are not in it: ranks may differ in them, and the smallest counts.
    """
    fields: dict[str, str | int] = {
        "world_size": group.world_size,
        "tp": group.tp,
        "pp": group.pp,
        "cp": group.cp,
        "lag": group.lag,
        "lockstep": int(group.lockstep),
        "page_tokens": group.page_tokens,
        "pools": ",".join(pool.name for pool in group.pools),
        "write_policy": group.write_policy.value,
        "write_hits_min": group.write_hits_min,
        "eviction": group.eviction.value,
        "divergence": group.divergence.value,
        "agreement": group.agreement.value,
    }
    for pool in group.pools:
        fields[f"pools.{pool.name}.page_bytes"] = pool.page_bytes
        fields[f"pools.{pool.name}.layers"] = pool.layers
        fields[f"pools.{pool.name}.parts"] = pool.parts
        fields[f"pools.{pool.name}.stage_layers"] = ",".join(map(str, pool.stage_layers))
        fields[f"pools.{pool.name}.dtype"] = pool.dtype
    return fields
