"""The host memory of one worker: its own pools, and where host pages are kept once those of the ranks that keep them.

Such pools are unnamed files in memory that the workers of one host map from each other. A map outlives the process that
made it, so a worker that dies takes no memory away from under a copy. It does not know when pages are copied.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.config.process import WorkerConfig
from kvcoord.dma.cuda import CudaCopyEngine
from kvcoord.dma.engine import PoolCopy
from kvcoord.domain import Layout, Rank
from kvcoord.errors import ConfigError, PeerUnavailable
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory, Pages
from kvcoord.memory.shared import SharedHandle, SharedPages, attach
from kvcoord.memory.shares import Shares

log = logging.getLogger(__name__)

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
PROCESS_NAMES: Final = Path("/proc/self/ns/pid")


class _Reach(msgspec.Struct, array_like=True, frozen=True):
    """How another worker of this host maps a rank's pools: process, and (descriptor, inode) of each pool."""

    host: str
    pid: int
    layout: Layout
    pools: list[tuple[int, int]]


_DECODER: Final = msgspec.msgpack.Decoder(_Reach)


class HostMemory:
    """`own` are the pools of this rank, one for each of its geometries. Open it once."""

    def __init__(self, config: WorkerConfig, geometries: Sequence[PoolGeometry]) -> None:
        self.own: list[PageMemory] = []
        group = config.group
        self._config = config
        self._geometries = geometries
        self._files: list[SharedPages] = []
        self._following = asyncio.Lock()
        self._shares = (
            Shares(config.rank, group.world_size, group.kv_replicas, config.host_pages)
            if group.kv_replicas > 1
            else None
        )
        self._mapped: dict[Rank, tuple[bytes, list[PageMemory]]] = {}
        """Pools of the other ranks that hold the same bytes, with what they were mapped from."""

    def open(self, slots: Sequence[int]) -> None:
        """Makes so many slots of each pool. Raises ConfigError when this host cannot."""
        layout = self._config.copies.host_layout
        for geometry, count in zip(self._geometries, slots, strict=True):
            if self._shares is None:
                self.own.append(PageMemory.anonymous(geometry, count, layout))
            else:
                self._files.append(SharedPages.create(geometry, count, layout))
                self.own.append(self._files[-1].memory)

    @property
    def reach(self) -> bytes:
        """What `follow` needs on the other ranks. Empty where nobody else needs these pools."""
        if self._shares is None or not self._files:
            return b""
        handles = [pages.handle() for pages in self._files]
        layout = self._config.copies.host_layout
        reach = _Reach(_this_host(), os.getpid(), layout, [(handle.fd, handle.inode) for handle in handles])
        return msgspec.msgpack.encode(reach)

    async def follow(self, named: dict[Rank, bytes], gpu: CudaCopyEngine | None) -> None:
        """Maps the pools of these ranks, and locks them for the GPU that copies, which may take seconds. Lets those of
        their former lives go. No copy may run.

        One that is gone again has nothing to copy from: its group hears of that too. Raises ConfigError for a rank that
        is on another host, or memory that cannot be locked.
        """
        async with self._following:
            for rank, reach in named.items():
                held = self._mapped.get(rank)
                if rank == self._config.rank or (held is not None and held[0] == reach):
                    continue
                self._forget(rank, gpu)
                try:
                    pools = self._map(rank, _DECODER.decode(reach))
                except PeerUnavailable as gone:
                    log.warning("host memory of rank %d: %s", rank, gone)
                    continue
                self._mapped[rank] = reach, pools
                if gpu is not None:
                    for memory in pools:
                        await asyncio.get_running_loop().run_in_executor(None, gpu.pin, memory)

    def to_host(self, number: int, device: Pages, device_slots: Sequence[int], slots: Sequence[int]) -> list[PoolCopy]:
        """Copies of one pool out of the device: of the pages that this rank keeps."""
        shares = self._shares
        if shares is None:
            return [PoolCopy(device, self.own[number], device_slots, slots)]
        kept = [(at, slot) for at, slot in zip(device_slots, slots, strict=True) if shares.share_of(slot) == shares.own]
        places = [shares.place(slot) for _, slot in kept]
        return [PoolCopy(device, self.own[number], [at for at, _ in kept], places)]

    def to_device(
        self, number: int, device: Pages, slots: Sequence[int], device_slots: Sequence[int]
    ) -> list[PoolCopy]:
        """Copies of one pool into the device: one from each rank that keeps some of the pages.

        Raises PeerUnavailable when the memory of one is not mapped.
        """
        shares = self._shares
        if shares is None:
            return [PoolCopy(self.own[number], device, slots, device_slots)]
        by_share: dict[int, tuple[list[int], list[int]]] = {}
        for slot, at in zip(slots, device_slots, strict=True):
            places, targets = by_share.setdefault(shares.share_of(slot), ([], []))
            places.append(shares.place(slot))
            targets.append(at)
        return [
            PoolCopy(self._pools(shares.holders[share])[number], device, places, targets)
            for share, (places, targets) in by_share.items()
        ] or [PoolCopy(self.own[number], device, [], [])]

    def close(self) -> None:
        """Unmaps everything. Copies under way keep what they need until they are over."""
        for rank in list(self._mapped):
            self._forget(rank, None)
        for memory in self._files or self.own:
            memory.close()
        self.own.clear()
        self._files.clear()

    def _pools(self, rank: Rank) -> list[PageMemory]:
        if rank == self._config.rank:
            return self.own
        held = self._mapped.get(rank)
        if held is None:
            raise PeerUnavailable(f"host memory of rank {rank}", "was gone when it was to be mapped")
        return held[1]

    def _map(self, rank: Rank, reach: _Reach) -> list[PageMemory]:
        if reach.host != _this_host():
            fix = f"rank {rank} is on another host, or in another PID namespace: ranks that share host pages are on one"
            raise ConfigError("group.kv_replicas", self._config.group.kv_replicas, fix)
        capacity = self._config.host_pages
        mapped: list[PageMemory] = []
        try:
            for geometry, (fd, inode) in zip(self._geometries, reach.pools, strict=True):
                handle = SharedHandle(reach.pid, fd, inode, geometry.total_bytes(capacity), geometry, capacity)
                mapped.append(attach(handle, reach.layout))
        except BaseException:
            for memory in mapped:
                memory.close()
            raise
        return mapped

    def _forget(self, rank: Rank, gpu: CudaCopyEngine | None) -> None:
        for memory in self._mapped.pop(rank, (b"", []))[1]:
            if gpu is not None:
                gpu.unpin(memory)
            memory.close()


def _this_host() -> str:
    """What two workers have in common that may map each other's memory."""
    return f"{BOOT_ID.read_text().strip()}/{os.readlink(PROCESS_NAMES)}"
