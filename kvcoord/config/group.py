"""What all ranks of a group must have in common: its shape, its pages, its policies."""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from kvcoord.config.fields import Count, PositiveInt, TailSlots, check_fields
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


class PoolKind(StrEnum):
    """Which pages of a sequence have a slot in a pool."""

    PAGES = "pages"
    """Every page: the KV cache, a side index, a draft."""

    WINDOW = "window"
    """The last `window_pages` pages: sliding-window attention."""

    STATE = "state"
    """The last page: the state after it, one slot a sequence."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of data that the pages of the group have: the KV cache, a side index, a sliding window, a state."""

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

    kind: PoolKind = PoolKind.PAGES
    """pages: every page has a slot. window: the last window_pages of a sequence. state: one slot, for its end."""

    window_pages: Count = 0
    """Pages at the end of a sequence that a pool of kind window keeps. 0 for the other kinds."""

    device_slots: TailSlots = 0
    """Slots of a pool of kind window or state in this rank's device memory; ranks may differ. 0: device_pages."""

    host_slots: TailSlots = 0
    """The same in this rank's host memory. 0: host_pages."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_kind()
        if self.page_bytes % self.parts:
            raise ConfigError(f"pools.{self.name}.parts", self.parts, f"must divide page_bytes={self.page_bytes}")

    def _check_kind(self) -> None:
        if (self.kind is PoolKind.WINDOW) != bool(self.window_pages):
            fix = "needs a number of pages" if self.kind is PoolKind.WINDOW else "is for pools of kind window only"
            raise ConfigError(f"pools.{self.name}.window_pages", self.window_pages, fix)
        if self.kind is PoolKind.PAGES and (self.device_slots or self.host_slots):
            fix = "is for pools of kind window or state: every page of the group has a slot in this one"
            raise ConfigError(f"pools.{self.name}.device_slots", (self.device_slots, self.host_slots), fix)

    @property
    def tail_pages(self) -> int:
        """Pages at the end of a sequence that have a slot in this pool, 0 for all of its pages."""
        return 1 if self.kind is PoolKind.STATE else self.window_pages

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

    kv_replicas: PositiveInt = 1
    """Neighbouring tensor-parallel ranks that hold the same bytes: tp for MLA (one latent), tp / KV heads for GQA with
    fewer heads than ranks. Each of their host pages is kept by one of them. 1: every rank has bytes of its own."""

    lag: Count = 0
    """Rounds between a frame and the step that applies its verdict, at least pp. 0: pp."""

    lockstep: bool = True
    """Whether the engines run in lockstep and call advance at every step. False: operations are voted one by one."""

    page_tokens: PositiveInt = 64
    """Tokens of one page."""

    pools: list[PoolConfig] = msgspec.field(default_factory=lambda: [_DEFAULT_POOL])
    """Pools of which a page takes one slot each, all or none; those that keep only the end of a sequence come last."""

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    """When pages are copied to the host: at once, after some hits, or when they leave the device."""

    write_hits_min: PositiveInt = 2
    """Hits after which write-through-selective copies a page."""

    eviction: EvictionPolicy = EvictionPolicy.LRU
    """Order in which pages are evicted; ties end with the page key."""

    divergence: DivergencePolicy = DivergencePolicy.STOP
    """What follows when the ranks' digests differ: stop the group; drop the cache on all ranks and begin anew (resync);
    or warn and go on.
    """

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
        self._check_replicas()

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
        self._check_tails()

    def _check_tails(self) -> None:
        """Pools that keep only the end of a sequence: after the others, and where all ranks step together."""
        tails = [bool(pool.tail_pages) for pool in self.pools]
        if not any(tails):
            return
        first = self.pools[tails.index(True)]
        field, kind = f"pools.{first.name}.kind", first.kind.value
        if tails[0] or tails != sorted(tails):
            raise ConfigError(field, kind, "list the pools of kind pages first: a window or a state belongs to pages")
        if not self.lockstep:
            fix = "needs lockstep=true: without it an engine offers slots for whole pages only"
            raise ConfigError(field, kind, fix)
        if self.write_policy is WritePolicy.WRITE_BACK:
            fix = "cannot be written back: its slots may leave the device before their page; use write-through"
            raise ConfigError(field, kind, fix)

    def _check_replicas(self) -> None:
        """Host pages that are kept once: where slot numbers are the same on all ranks, and their bytes too."""
        if self.kv_replicas == 1:
            return
        fix = ""
        if self.tp % self.kv_replicas:
            fix = f"must divide tp={self.tp}: neighbouring ranks of one stage hold the same bytes"
        elif self.cp > 1:
            fix = f"needs cp=1, not {self.cp}: context-parallel ranks hold bytes of different tokens"
        elif not self.lockstep:
            fix = "needs lockstep=true: without it the ranks do not hand out host slots in one order"
        elif self.agreement is AgreementMode.NONE:
            fix = "needs agreement=kvcoord: ranks that decide alone do not know what the others keep"
        elif self.divergence is not DivergencePolicy.STOP:
            fix = "needs divergence=stop: a rank that differs would read other pages than it means to"
        elif any(pool.tail_pages for pool in self.pools):
            fix = "needs pools of kind pages only: a window or a state is kept by every rank"
        if fix:
            raise ConfigError("kv_replicas", self.kv_replicas, fix)

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
        "kv_replicas": group.kv_replicas,
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
        fields[f"pools.{pool.name}.kind"] = pool.kind.value
        fields[f"pools.{pool.name}.window_pages"] = pool.window_pages
        fields[f"pools.{pool.name}.page_bytes"] = pool.page_bytes
        fields[f"pools.{pool.name}.layers"] = pool.layers
        fields[f"pools.{pool.name}.parts"] = pool.parts
        fields[f"pools.{pool.name}.stage_layers"] = ",".join(map(str, pool.stage_layers))
        fields[f"pools.{pool.name}.dtype"] = pool.dtype
    return fields
