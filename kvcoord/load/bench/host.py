"""Where a benchmark ran, and what its processes use of the machine. Linux only: reads /proc."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One process at one moment. `cpu_s` is what all its threads have used so far."""

    resident_bytes: int
    cpu_s: float
    threads: int
    descriptors: int


def usage(pid: int) -> Usage:
    """Raises ProcessLookupError when the process has ended."""
    folder = Path("/proc") / str(pid)
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        descriptors = len(os.listdir(folder / "fd"))
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    return Usage(
        resident_bytes=int(fields[21]) * PAGE_BYTES,
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        threads=int(fields[17]),
        descriptors=descriptors,
    )


def machine_busy_s() -> float:
    """Seconds that all cores together have worked for anybody since the system started."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _idle, _waiting, *others = map(int, first.split()[1:9])
    return (user + nice + system + sum(others)) / TICKS_PER_S


def where() -> str:
    """The machine and the versions that matter, in one line."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    packages = ", ".join(f"{name} {_version(name)}" for name in ("kvcoord", "pyzmq", "msgspec", "torch"))
    return (
        f"{_processor()}, {cores} cores, load {load:.1f} at the start, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {packages}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
