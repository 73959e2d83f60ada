"""The options of the two processes: the coordinator of some groups, and the worker of one rank."""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from kvcoord.config.address import check_link, check_loopback, split_host_port
from kvcoord.config.fields import Count, PositiveInt, Slots, check_fields
from kvcoord.config.group import GroupConfig
from kvcoord.config.limits import Limits
from kvcoord.config.timeouts import Timeouts
from kvcoord.domain import Layout
from kvcoord.errors import ConfigError

COORDINATOR_ADDRESS: Final = "unix:///run/kvcoord/coordinator.sock"

RANK_PLACEHOLDER: Final = "{rank}"
"""Stands for the worker's rank in its addresses and key folder, so that all ranks of a node can share one file."""

Address = Annotated[str, msgspec.Meta(min_length=1)]

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """One record a line: for people, or one JSON object for machines."""

    TEXT = "text"
    JSON = "json"


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One coordinator process."""

    bind: list[Address] = msgspec.field(default_factory=lambda: [COORDINATOR_ADDRESS])
    """Addresses on which ranks reach this coordinator: unix:///path, or over ZeroMQ ipc:///path or tcp://host:port."""

    http: str | None = "127.0.0.1:18470"
    """Loopback host:port for health, metrics and status. Port 0: the system picks one. Null: no HTTP."""

    insecure_tcp: bool = False
    """Accept tcp without CURVE keys. Anybody who reaches the port can then join a group."""

    curve_keys_dir: str | None = None
    """Folder with this coordinator's CURVE keys and the public keys of the ranks that may connect; required for tcp."""

    recorder_dir: str | None = None
    """Folder into which the flight recorder is written. Null: a folder of this user's runtime directory."""

    timeouts: Timeouts = Timeouts()
    """How long each wait may take."""

    limits: Limits = Limits()
    """How much of everything may exist at once."""

    log_level: LogLevel = LogLevel.INFO
    """The least severe records that are written: debug, info, warning or error."""

    log_format: LogFormat = LogFormat.TEXT
    """text for people, json for machines; always to stderr."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check_links("bind", self.bind)
        _check_http(self.http)
        _check_security("bind", self.bind, self.curve_keys_dir, insecure_tcp=self.insecure_tcp)


class CopyEngineKind(StrEnum):
    """Who moves bytes between device and host."""

    CPU = "cpu"
    """This process, between memories of this host: for engines without a GPU."""

    CUDA = "cuda"
    """The GPU itself, through its driver."""


class CopiesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How this rank copies pages between device and host."""

    engine: CopyEngineKind = CopyEngineKind.CPU
    """cpu, or cuda for an engine whose pages are in a GPU's memory."""

    cuda_device: Count = 0
    """The GPU of this rank, as this process counts those that it sees."""

    host_layout: Layout = Layout.LAYER_FIRST
    """Order of the host pool's bytes: layer-first, or page-first to keep each page in one piece."""

    checksums: bool = False
    """Take a checksum of every page written through, and load none whose bytes have changed since."""

    bytes_in_flight_max: PositiveInt = 256 * 1024 * 1024
    """With cuda: copies of one direction that may be with the GPU at once; others wait their turn."""

    numa_node: int | None = None
    """NUMA node whose memory the host pools should have. Null: the GPU's node with cuda, else no wish."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.numa_node is not None and self.numa_node < 0:
            raise ConfigError("copies.numa_node", self.numa_node, "must be the number of a node, or null")


class CopyFaultsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Makes this rank's copies late or fail: to see what a slow rank does. Never in production."""

    delay_s: NotNegative = 0.0
    """Every copy starts this much late."""

    delay_random_s: NotNegative = 0.0
    """Every copy starts up to this much later still, at random."""

    fail_every: Count = 0
    """Every so many-th copy fails at its last layer. 0: none does."""

    jitter_bytes_max: Count = 0
    """With cuda: after each event up to this many bytes are copied for nothing, to smoke out missing waits. 0: none."""

    seed: Count = 0
    """Seed of the random delays and of the jitter."""

    def __post_init__(self) -> None:
        check_fields(self)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The worker (sidecar) of one rank.

    `{rank}` in `listen`, `http` and `curve_keys_dir` is replaced by the rank when the struct is made.
    """

    group: GroupConfig = GroupConfig()
    """The group this rank belongs to, and what its ranks have in common."""

    rank: Count
    """This rank, from 0 to world_size - 1."""

    listen: Address = "ipc:///run/kvcoord/rank{rank}.sock"
    """Address on which this rank's engine reaches its worker. {rank} stands for the rank."""

    coordinators: list[Address] = msgspec.field(default_factory=lambda: [COORDINATOR_ADDRESS])
    """Addresses of the coordinators, the preferred one first, in the same order on all ranks."""

    embed_coordinator: bool = False
    """Rank 0's worker also runs the coordinator, at the first of these addresses: no process of its own is needed."""

    device_pages: Slots = 4096
    """Pages that each pool holds in device memory, but for those with device_slots. Ranks may differ: the smallest
    counts."""

    host_pages: Slots = 16384
    """Pages that each pool holds in this rank's host memory, but for those with host_slots. Ranks may differ: the
    smallest counts. With group.kv_replicas they may not, and ranks that hold the same bytes share what they have."""

    http: str | None = "127.0.0.1:0"
    """Loopback host:port for health, metrics and status. Port 0: the system picks one. Null: no HTTP."""

    insecure_tcp: bool = False
    """Speak tcp without CURVE keys. Anybody on the path can then read and change votes."""

    curve_keys_dir: str | None = None
    """Folder with this rank's CURVE keys and the coordinators' public key; required for tcp."""

    recorder_dir: str | None = None
    """Folder into which the flight recorder is written. Null: a folder of this user's runtime directory."""

    timeouts: Timeouts = Timeouts()
    """How long each wait may take."""

    limits: Limits = Limits()
    """How much of everything may exist at once."""

    copies: CopiesConfig = CopiesConfig()
    """How pages are copied between device and host."""

    copy_faults: CopyFaultsConfig = CopyFaultsConfig()
    """Copies that go wrong on purpose, for demonstrations."""

    log_level: LogLevel = LogLevel.INFO
    """The least severe records that are written: debug, info, warning or error."""

    log_format: LogFormat = LogFormat.TEXT
    """text for people, json for machines; always to stderr."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("listen", "http", "curve_keys_dir"):
            value = getattr(self, name)
            if value is not None:
                msgspec.structs.force_setattr(self, name, value.replace(RANK_PLACEHOLDER, str(self.rank)))
        self._check_rank()
        check_link("listen", self.listen, tcp=False)
        _check_links("coordinators", self.coordinators)
        _check_ports("coordinators", self.coordinators)
        _check_http(self.http)
        _check_security("coordinators", self.coordinators, self.curve_keys_dir, insecure_tcp=self.insecure_tcp)

    @property
    def device_slots(self) -> list[int]:
        """Slots of each pool of the group in this rank's device memory."""
        return [pool.device_slots or self.device_pages for pool in self.group.pools]

    @property
    def host_slots(self) -> list[int]:
        """Slots of each pool of the group in this rank's host memory."""
        return [pool.host_slots or self.host_pages for pool in self.group.pools]

    @property
    def host_pages_shared(self) -> int:
        """Host pages of all ranks that hold the same bytes as this one."""
        return self.host_pages * self.group.kv_replicas

    def _check_rank(self) -> None:
        group, limits = self.group, self.limits
        if self.rank >= group.world_size:
            raise ConfigError("rank", self.rank, f"must be below world_size={group.world_size}")
        if group.world_size > limits.ranks_max:
            raise ConfigError("group.world_size", group.world_size, f"must be at most ranks_max={limits.ranks_max}")
        for pool, device, host in zip(group.pools, self.device_slots, self.host_slots, strict=True):
            if device < 2 * pool.tail_pages or host < pool.tail_pages:
                fix = f"a request goes on from one end and leaves another: at least {2 * pool.tail_pages} on the device"
                raise ConfigError(f"group.pools.{pool.name}.device_slots", (device, host), f"{fix}, half on the host")
        if group.kv_replicas > 1:
            self._check_replicas()
        if limits.rounds_kept_max <= group.lag:
            raise ConfigError("limits.rounds_kept_max", limits.rounds_kept_max, f"must exceed lag={group.lag}")

    def _check_replicas(self) -> None:
        """What cannot be done with host pages in the memory of another rank's worker."""
        if self.copies.checksums:
            fix = "must be false with group.kv_replicas > 1: who loads a page has not always written it"
            raise ConfigError("copies.checksums", self.copies.checksums, fix)


def _check_links(field: str, addresses: list[str]) -> None:
    if not addresses:
        raise ConfigError(field, [], "must list at least one address")
    places = [_place(address) for address in addresses]
    for address in addresses:
        check_link(field, address, tcp=True)
        if places.count(_place(address)) > 1:
            raise ConfigError(field, addresses, f"{address} is listed twice")


def _place(address: str) -> str:
    """What two addresses of one socket have in common: its path, however it is spoken to."""
    return address.removeprefix("unix://").removeprefix("ipc://")


def _check_ports(field: str, addresses: list[str]) -> None:
    """Addresses to connect to need a port of their own: only who listens can let the system pick one."""
    for address in addresses:
        scheme, _, rest = address.partition("://")
        if scheme == "tcp" and split_host_port(field, rest)[1] == 0:
            raise ConfigError(field, address, "name the port that the coordinator listens on")


def _check_http(address: str | None) -> None:
    if address is not None:
        check_loopback("http", address)


def _check_security(field: str, addresses: list[str], keys_dir: str | None, *, insecure_tcp: bool) -> None:
    """tcp needs keys, or the flag that says it does not."""
    if keys_dir is not None or insecure_tcp:
        return
    for address in addresses:
        if address.startswith("tcp://"):
            raise ConfigError(field, address, "tcp needs keys: set curve_keys_dir, or insecure_tcp to do without")
