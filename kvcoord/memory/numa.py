"""Which NUMA node host memory belongs on, and how to have the system put it there.

A GPU reaches the memory of its own socket faster than that of another. The system places a page where the thread that
touches it first runs, which says nothing of the GPU, so a worker states its wish before anything is touched. It is a
preference: when that node is full the next one is taken. Linux only. It does not know what the memory is for.
"""

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.errors import ConfigError
from kvcoord.memory.pages import PageMemory

SYSFS: Final = Path("/sys")

_MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, by machine; the C library has no function for it."""
_PREFERRED: Final = 1
_WORD_BITS: Final = 64

_syscall: Final = ctypes.CDLL(None, use_errno=True)["syscall"]
_syscall.restype = ctypes.c_long


class Placement(msgspec.Struct, frozen=True):
    """Where memory goes: a node, or (None) where the system puts it. `reason` says why, in words for a log."""

    node: int | None
    reason: str


def placement(asked: int | None, pci_bus_id: str | None, sysfs: Path = SYSFS) -> Placement:
    """The node of host memory: the one asked for, else that of the GPU at this PCI address (`0000:3b:00.0`).

    Raises ConfigError when this host has no such node as was asked for.
    """
    nodes = nodes_with_memory(sysfs)
    if asked is not None and asked not in nodes:
        raise ConfigError("copies.numa_node", asked, f"this host has memory on the nodes {nodes}; name one of them")
    if len(nodes) < 2:
        return Placement(None, "this host has one NUMA node")
    if asked is not None:
        return Placement(asked, "copies.numa_node says so")
    if pci_bus_id is None:
        return Placement(None, "neither a GPU nor copies.numa_node names a NUMA node")
    node = node_of_pci_device(pci_bus_id, sysfs)
    if node not in nodes:
        return Placement(None, f"the system does not know the NUMA node of the GPU at {pci_bus_id}")
    return Placement(node, f"the GPU at {pci_bus_id} is there")


def nodes_with_memory(sysfs: Path = SYSFS) -> list[int]:
    """Numbers of the nodes, ascending. A host that does not tell has node 0."""
    try:
        text = (sysfs / "devices/system/node/has_memory").read_text().strip()
    except OSError:
        return [0]
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes


def node_of_pci_device(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """The node of the device at this PCI address, None when the system does not know."""
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(memory: PageMemory, node: int) -> None:
    """Have untouched pages of this memory come from `node`. Raises OSError where the system does not allow it.

    Containers often forbid the call (EPERM) unless they have SYS_NICE.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"the number of mbind on {platform.machine()} is not known")
    words = (ctypes.c_uint64 * (node // _WORD_BITS + 1))()
    words[-1] = 1 << node % _WORD_BITS
    # The kernel takes one bit less than it is told.
    bits = len(words) * _WORD_BITS + 1
    address, size_bytes = ctypes.c_void_p(memory.base_address), ctypes.c_size_t(memory.size_bytes)
    with memory.buffer():
        if _syscall(number, address, size_bytes, _PREFERRED, words, ctypes.c_ulong(bits), 0):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
