"""One cache's place in its group: joining it, and the parts that then agree for the cache."""

import logging
import os
from importlib.metadata import version
from typing import Any

import msgspec
from sglang.srt.runtime_context import get_parallel

from kvcoord.config import WorkerConfig
from kvcoord.integrations.sglang.attachment import Attachment
from kvcoord.integrations.sglang.capacity import Capacity
from kvcoord.integrations.sglang.components import Pools
from kvcoord.integrations.sglang.copies import Copies
from kvcoord.integrations.sglang.metrics import Port, RankMetrics
from kvcoord.integrations.sglang.rounds import EVENTS_KEPT, Membership, Rounds
from kvcoord.integrations.sglang.settings import read_settings
from kvcoord.integrations.sglang.storage import Storage
from kvcoord.integrations.sglang.support import group_suffix, lag_min, settings_fingerprint
from kvcoord.integrations.sglang.topology import embedded_address, read_topology
from kvcoord.integrations.sglang.writes import Writes
from kvcoord.protocol.digest import Digest
from kvcoord.runtime.member import Member

log = logging.getLogger(__name__)

Cache = Any
"""A KvcoordRadixCache. Not imported: it imports this module."""


class Agreement:
    """The parts of one cache's agreement, joined to its group."""

    def __init__(self, cache: Cache, member: Membership, digest: Digest, config: WorkerConfig) -> None:
        lag = config.group.lag
        self.rounds = Rounds(member, digest, lag)
        self.pools = Pools(cache)
        self.capacity = Capacity(self.pools.device_free(), self.pools.host_free())
        self.outgoing = Copies(self.rounds)
        self.incoming = Copies(self.rounds)
        self.writes = Writes(cache, self.rounds, self.pools, self.capacity, self.outgoing)
        self.storage = Storage(cache, self.rounds)
        self.attachment = Attachment(cache, self.rounds, self.storage, config.timeouts.copy_timeout_s)
        counted = self.capacity.now()
        self.capacity.begin(counted, member.open(counted))
        self._port: Port | None = None

    def open_port(self, config: WorkerConfig) -> None:
        """Shows this rank's metrics at the configured address. Raises ConfigError when that is not possible."""
        if config.http is None:
            return
        where = config.group.name, config.rank
        metrics = RankMetrics(*where, self.rounds.counters, self.capacity, lambda: self.rounds.state, self._open_count)
        self._port = Port(config.http, metrics.routes())
        self._port.open()
        log.info("kvcoord: metrics of rank %d at http://%s/metrics", config.rank, self.http_address)

    @property
    def http_address(self) -> str:
        """Where this rank's metrics are, host and port; empty when they are not shown."""
        return "" if self._port is None else self._port.address

    def _open_count(self) -> int:
        return len(self.writes) + len(self.outgoing) + len(self.incoming)

    def close(self) -> None:
        """Leaves the group. Harmless when repeated."""
        if self._port is not None:
            self._port.close()
        self.rounds.close()

    def reset(self) -> None:
        for part in (self.writes, self.outgoing, self.incoming, self.storage):
            part.reset()
        self.rounds.begin_life()


def join(cache: Cache, server_args: Any, params: Any) -> Agreement:
    """Joins the group of this rank; every rank of it calls this at the same point of its start.

    Raises ConfigError or UsageError for settings that cannot work, JoinRefused when ranks have different ones,
    GroupLost when some of them do not come.
    """
    topology = read_topology(params)
    lag, suffix = lag_min(server_args, topology), group_suffix(get_parallel())
    found = read_settings(os.environ, topology, lag_min=lag, suffix=suffix)
    config = found.config
    if "coordinators" not in found.sources:
        address = embedded_address(topology, params)
        config = msgspec.structs.replace(config, coordinators=[address], embed_coordinator=True)
    fingerprint = {
        **settings_fingerprint(cache, server_args),
        "kvcoord": version("kvcoord"),
        "world_size": topology.world_size,
        "tp": topology.tp,
        "pp": topology.pp,
        "cp": topology.cp,
        "lag": config.group.lag,
    }
    where = "embedded in rank 0" if config.embed_coordinator else ", ".join(config.coordinators)
    log.info(
        "kvcoord: rank %d of %d joins group %s, lag %d, coordinator %s",
        *(topology.rank, topology.world_size, config.group.name, config.group.lag, where),
    )
    digest = Digest(EVENTS_KEPT)
    agreement = Agreement(cache, Member(config, fingerprint, events=digest.log), digest, config)
    if "http" in found.sources:
        agreement.open_port(config)
    return agreement
