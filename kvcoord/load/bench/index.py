"""`kvcoord bench index`: the index at growing sizes, against SGLang's tree cores where they are installed.

The tree holds paths of 188 pages (12,032 tokens in pages of 64): long conversations. SGLang needs an interpreter of its
own and a place to run on a CPU: see `sglang_tree`.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.domain import PageKey, Tier
from kvcoord.errors import PeerUnavailable
from kvcoord.index.eviction import LruOrder
from kvcoord.index.keys import block_page_keys, token_page_keys
from kvcoord.index.tree import RadixTree
from kvcoord.load.bench.result import Chart, Line, Result, Series

PATH_PAGES: Final = 188
PAGE_TOKENS: Final = 64
TOKENS: Final = tuple(range(PATH_PAGES * PAGE_TOKENS))
SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
ACTS: Final = 100
OPERATIONS: Final = ("match", "insert", "split", "evict", "keys")
PEER_TIMEOUT_S: Final = 300.0


class IndexRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on one path at one size. `peer` is a tree core of SGLang at its only size; None without it."""

    case: str
    pages: int
    p50_us: float
    p99_us: float
    peer: str = ""
    peer_p50_us: float | None = None
    ratio_p50: float | None = None
    budget: str = ""
    met: bool | None = None


class PeerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a tree core of SGLang takes for a path of as many tokens."""

    core: str
    pages: int
    match_us: float
    insert_us: float


class PeerPlace(msgspec.Struct, frozen=True):
    """The interpreter that has SGLang, and the folder of `sgl_cpu_harness`."""

    python: Path
    harness: Path


async def index(
    *, quick: bool, peer: PeerPlace | None = None, on_case: Callable[[str], None] = lambda _: None
) -> Result:
    """Measures every size, each in this process."""
    peers = []
    notes = [
        f"A path has {PATH_PAGES} pages; a split inserts a path that parts from a cached one in its middle.",
        "kvcoord is asked by page keys, SGLang by tokens: 'keys' is the time to make the keys of a path from its"
        " tokens, which an engine does once for each request.",
    ]
    if peer is None:
        notes.append("SGLang's tree cores were not run: name the interpreter that has them with --sglang-python.")
    else:
        on_case("SGLang's tree cores")
        peers = [await _peer_times(peer, core) for core in ("rust", "python")]
        notes.append(f"SGLang's cores hold {peers[0].pages:,} pages, ours as many as the row says.")
    rows: list[IndexRow] = []
    for pages in SIZES[:2] if quick else SIZES:
        on_case(f"{pages:,} pages")
        rows += index_rows(pages, measure(pages), peers)
    return Result(name="index", title="The index of one rank", rows=rows, charts=[_chart(rows)], notes=notes)


def measure(pages: int) -> dict[str, list[float]]:
    """Microseconds of each operation on a tree of so many pages."""
    tree = RadixTree(LruOrder())
    paths = [path(number) for number in range(max(pages // PATH_PAGES, 1))]
    for tick, keys in enumerate(paths):
        tree.insert(keys, 0, (list(range(tick * PATH_PAGES, (tick + 1) * PATH_PAGES)),), tick)
    gc.collect()
    gc.freeze()
    begin = len(paths)
    acts = min(ACTS, max(len(paths) // 2, 2))
    slots = (list(range(PATH_PAGES)),)
    step = max(len(paths) // acts, 1)
    some = paths[::step][:acts]
    times = {
        "match": _each(some, tree.match),
        "insert": _each(
            [path(begin + number) for number in range(acts)], lambda keys: tree.insert(keys, 0, slots, begin)
        ),
        "split": _each([_parting(keys) for keys in some], lambda keys: tree.insert(keys, 0, slots, begin)),
        "evict": _each([[]] * acts, lambda _: tree.evict(Tier.DEVICE, PATH_PAGES)),
        "keys": _each([[]] * acts, lambda _: token_page_keys(TOKENS, PAGE_TOKENS)),
    }
    gc.unfreeze()
    return times


def index_rows(pages: int, times: dict[str, list[float]], peers: Sequence[PeerTimes]) -> list[IndexRow]:
    """A row for each operation, and for each peer that has it too."""
    rows = []
    for operation in OPERATIONS:
        series = Series(operation, times[operation])
        p50, p99 = series.quantile(0.5), series.quantile(0.99)
        against = [(core.core, _peer_us(core, operation)) for core in peers if _peer_us(core, operation)]
        for name, peer_us in against or [("", None)]:
            counts = name == "rust" and peer_us is not None
            rows.append(
                IndexRow(
                    case=operation,
                    pages=pages,
                    p50_us=p50,
                    p99_us=p99,
                    peer=name and f"SGLang's {name} core",
                    peer_p50_us=peer_us,
                    ratio_p50=None if peer_us is None else p50 / peer_us,
                    budget="p50 <= the Rust core" if counts else "",
                    met=p50 <= peer_us if counts and peer_us is not None else None,
                )
            )
    return rows


def path(number: int) -> list[PageKey]:
    """The keys of one path: equal to no other one's."""
    return block_page_keys(range(number * PATH_PAGES, (number + 1) * PATH_PAGES))


def _parting(keys: list[PageKey]) -> list[PageKey]:
    """A path that shares the first half of this one."""
    half = PATH_PAGES // 2
    return keys[:half] + [bytes(reversed(key)) for key in keys[half:]]


def _each(paths: Sequence[list[PageKey]], act: Callable[[list[PageKey]], object]) -> list[float]:
    micros = []
    for keys in paths:
        begun = time.perf_counter_ns()
        act(keys)
        micros.append((time.perf_counter_ns() - begun) / 1000)
    return micros


def _peer_us(peer: PeerTimes, operation: str) -> float | None:
    return {"match": peer.match_us, "insert": peer.insert_us}.get(operation)


async def _peer_times(peer: PeerPlace, core: str) -> PeerTimes:
    """Raises PeerUnavailable when SGLang does not run there."""
    script = Path(__file__).with_name("sglang_tree.py")
    process = await asyncio.create_subprocess_exec(
        str(peer.python),
        *(str(script), core, str(PATH_PAGES), str(SIZES[1])),
        env={"PYTHONPATH": str(peer.harness), "PATH": str(Path(sys.executable).parent)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PEER_TIMEOUT_S):
        said, errors = await process.communicate()
    if process.returncode:
        raise PeerUnavailable("SGLang's tree core", errors.decode(errors="replace").strip()[-400:])
    return msgspec.json.decode(said.splitlines()[-1], type=PeerTimes)


def _chart(rows: list[IndexRow]) -> Chart:
    lines = {
        operation: [(float(row.pages), row.p50_us) for row in rows if row.case == operation] for operation in OPERATIONS
    }
    return Chart(
        title=f"Median time of one operation on a path of {PATH_PAGES} pages",
        x_label="pages in the index",
        y_label="microseconds",
        lines=[Line(operation, sorted(set(points))) for operation, points in lines.items()],
        x_log=True,
        y_log=True,
    )
