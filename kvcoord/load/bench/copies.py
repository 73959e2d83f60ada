"""`kvcoord bench copy`: pages between two memories, against one memcpy of as many bytes and against torch indexing.

What counts is processor time, from making the plan to the transfer having landed on the event loop, of all threads of
this process: what other processes do to the clock on the wall is nobody's cost. Every case moves about the same number
of bytes, more than the caches of one core hold.
"""

import asyncio
import ctypes
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from random import Random
from statistics import median
from typing import Final

import msgspec

from kvcoord.dma.cpu import INLINE_BYTES_MAX, CpuCopyEngine
from kvcoord.dma.engine import CopyPlan, Direction, PoolCopy
from kvcoord.load.bench.result import Chart, Line, Result
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory

PAGE_BYTES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
LAYERS: Final = (1, 16, 64)
CASE_BYTES: Final = 64 << 20
BUDGET_PAGE_BYTES: Final = 16 << 10
RATIO_MIN: Final = 0.8
GIB: Final = 1 << 30
RUN_PAGES: Final = 8
TORCH_REPEATS: Final = 2
"""Indexing takes some twenty times as long as a copy."""

CONTIGUOUS: Final = "contiguous"
RUNS: Final = "runs of 8"
SCATTERED: Final = "scattered"

THREAD: Final = "thread"
"""A transfer of many pages is copied by a thread, while the loop runs on."""
AT_ONCE: Final = "at once"
"""A transfer of few pages is copied before `submit` returns; here all pages are, so that as many bytes are measured."""


class CopyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case. Rates are by processor time. Ratios are of rates: above one is faster than the peer; None: no torch."""

    case: str
    page_bytes: int
    layers: int
    pages: int
    direction: str
    copied: str
    gib_per_s: float
    ratio_memcpy: float
    ratio_torch: float | None
    budget: str
    met: bool | None


class CopyCase(msgspec.Struct, frozen=True, kw_only=True):
    """What is copied. `page_bytes` is one page in one layer."""

    arrangement: str
    page_bytes: int
    layers: int
    direction: Direction
    copied: str = THREAD

    @property
    def pages(self) -> int:
        return max(CASE_BYTES // (self.page_bytes * self.layers), 1)


async def copies(*, quick: bool, on_case: Callable[[str], None] = lambda _: None) -> Result:
    """Measures every case on this event loop."""
    repeats = 3 if quick else 9
    rows = []
    for case in _cases(quick=quick):
        on_case(f"{case.arrangement}, {case.page_bytes >> 10} KiB x {case.layers}, {case.direction}, {case.copied}")
        rows.append(await _measure(case, repeats))
    notes = [
        f"Every case moves about {CASE_BYTES >> 20} MiB on one thread, some times in turn with its peers; a ratio is"
        " the median over these turns, of processor time. Page bytes are those of one page in one layer.",
        "The memcpy is one call for as many bytes, so what a ratio below one shows is the cost of many pieces.",
        "Copied by a thread: one transfer, as a worker copies more than 256 KiB. At once: on the loop's thread.",
    ]
    if find_spec("torch") is None:
        notes.append("torch is not installed here, so there is no indexing to compare with.")
    return Result(
        name="copy", title="Copies between device and host memory (CPU)", rows=rows, charts=_charts(rows), notes=notes
    )


def _cases(*, quick: bool) -> Iterator[CopyCase]:
    for layers in LAYERS[1:2] if quick else LAYERS:
        for page_bytes in PAGE_BYTES[:2] if quick else PAGE_BYTES:
            for arrangement in (CONTIGUOUS, RUNS, SCATTERED):
                for direction in Direction if page_bytes * layers <= CASE_BYTES else ():
                    for copied in (THREAD, AT_ONCE) if arrangement == SCATTERED else (THREAD,):
                        yield CopyCase(
                            arrangement=arrangement,
                            page_bytes=page_bytes,
                            layers=layers,
                            direction=direction,
                            copied=copied,
                        )


def slots(case: CopyCase, seed: int) -> list[int]:
    """Which slots of a memory of `case.pages` pages, in path order."""
    pages = case.pages
    if case.arrangement == CONTIGUOUS:
        return list(range(pages))
    length = RUN_PAGES if case.arrangement == RUNS else 1
    starts = list(range(0, pages, length))
    Random(seed).shuffle(starts)
    return [slot for start in starts for slot in range(start, min(start + length, pages))]


async def _measure(case: CopyCase, repeats: int) -> CopyRow:
    geometry = PoolGeometry("kv", case.layers, case.page_bytes, "uint8")
    here, there = slots(case, 1), slots(case, 2)
    at_once_bytes_max = CASE_BYTES if case.copied == AT_ONCE else INLINE_BYTES_MAX
    engine = CpuCopyEngine(asyncio.get_running_loop(), inline_bytes_max=at_once_bytes_max)
    with PageMemory.anonymous(geometry, case.pages) as source, PageMemory.anonymous(geometry, case.pages) as target:
        for memory in (source, target):
            ctypes.memset(memory.base_address, 1, memory.size_bytes)
        tensors = _tensor_copy(source, target, here, there)
        ours_s, memcpy_s, torch_s = [], [], []
        for number in range(repeats):
            ours_s.append(await _copy_s(engine, case, source, target, here, there))
            memcpy_s.append(
                _seconds(lambda: ctypes.memmove(target.base_address, source.base_address, source.size_bytes))
            )
            if tensors is not None and number < TORCH_REPEATS:
                torch_s.append(_seconds(tensors))
        del tensors
        await engine.close()
    ratio_memcpy = median(memcpy / ours for memcpy, ours in zip(memcpy_s, ours_s, strict=True))
    counts = case.page_bytes >= BUDGET_PAGE_BYTES
    return CopyRow(
        case=f"{case.arrangement}, {case.layers} layers",
        page_bytes=case.page_bytes,
        layers=case.layers,
        pages=case.pages,
        direction=case.direction.value,
        copied=case.copied,
        gib_per_s=geometry.total_bytes(case.pages) / median(ours_s) / GIB,
        ratio_memcpy=ratio_memcpy,
        ratio_torch=min(torch_s) / median(ours_s) if torch_s else None,
        budget=f">= {RATIO_MIN} of one memcpy" if counts else "",
        met=ratio_memcpy >= RATIO_MIN if counts else None,
    )


async def _copy_s(
    engine: CpuCopyEngine,
    case: CopyCase,
    source: PageMemory,
    target: PageMemory,
    here: list[int],
    there: list[int],
) -> float:
    begun = time.process_time()
    plan = CopyPlan("bench", case.direction, (PoolCopy(source, target, here, there),))
    await engine.submit(plan)
    return time.process_time() - begun


def _seconds(act: Callable[[], object]) -> float:
    begun = time.process_time()
    act()
    return time.process_time() - begun


def _tensor_copy(
    source: PageMemory, target: PageMemory, here: list[int], there: list[int]
) -> Callable[[], None] | None:
    if find_spec("torch") is None:
        return None
    from kvcoord.load.bench.tensors import TensorCopy

    return TensorCopy(source, target, here, there).run


def _charts(rows: list[CopyRow]) -> list[Chart]:
    charts = []
    for layers in sorted({row.layers for row in rows}):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.layers == layers and row.direction == Direction.DEVICE_TO_HOST:
                label = (
                    f"{row.case.split(',')[0]}, copied by a thread" if row.copied == THREAD else "scattered, at once"
                )
                lines.setdefault(label, []).append((row.page_bytes / 1024, row.ratio_memcpy))
        charts.append(
            Chart(
                title=f"Rate of a copy of pages with {layers} layers, of one memcpy",
                x_label="KiB of a page in one layer",
                y_label="share of memcpy's rate",
                lines=[Line(label, points) for label, points in lines.items()],
                x_log=True,
            )
        )
    return charts
