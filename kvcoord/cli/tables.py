"""A status as people read it: tables of groups, ranks, pools and copies. Knows where no status comes from."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvcoord.domain import Outcome
from kvcoord.observability.snapshot import (
    CoordinatorSnapshot,
    DecisionCount,
    GroupSnapshot,
    ProcessSnapshot,
    Snapshot,
    WorkerSnapshot,
)


def show(snapshot: Snapshot, address: str) -> RenderableType:
    """Everything that a person looks for, widest thing first."""
    if isinstance(snapshot, CoordinatorSnapshot):
        return Group(_process(snapshot, "coordinator", address), *_coordinator(snapshot))
    name = f"worker of rank {snapshot.rank} in group {snapshot.group}"
    return Group(_process(snapshot, name, address), *_worker(snapshot))


def _process(snapshot: ProcessSnapshot, name: str, address: str) -> Text:
    state = "[green]ready[/]" if snapshot.ready else f"[red]not ready: {_plain(snapshot.ready_reason)}[/]"
    return Text.from_markup(
        f"{_plain(name)} at {_plain(address)}: {state}, up {_duration(snapshot.uptime_s)}, "
        f"version {_plain(snapshot.version)}"
    )


def _coordinator(snapshot: CoordinatorSnapshot) -> list[RenderableType]:
    if not snapshot.groups:
        return [Text("no group has joined yet")]
    parts: list[RenderableType] = [_groups(snapshot.groups)]
    for group in snapshot.groups:
        parts += [_ranks(group), *_pages(group)]
    if snapshot.joins_refused:
        parts.append(Text(f"joins refused: {_counts(snapshot.joins_refused)}"))
    if snapshot.ignored:
        parts.append(Text(f"messages ignored: {_counts(snapshot.ignored)}"))
    return parts


def _groups(groups: list[GroupSnapshot]) -> Table:
    table = _table("groups", "group", "state", "epoch", "ranks", "round", "open", "commits", "aborts", "divergences")
    for group in groups:
        present = sum(rank.last_heard_s is not None for rank in group.ranks)
        colour, reason = ("green", "") if group.ready else ("red", f": {group.reason}")
        table.add_row(
            _plain(group.name),
            f"[{colour}]{_plain(group.state + reason)}[/]",
            str(group.epoch),
            f"{present}/{group.world_size}",
            str(group.round),
            str(group.operations_open),
            str(_total(group.decisions, Outcome.COMMIT)),
            _aborts(group.decisions),
            str(group.divergences) if not group.divergences else f"[red]{group.divergences}[/]",
        )
    return table


def _ranks(group: GroupSnapshot) -> Table:
    table = _table(f"ranks of {_plain(group.name)}", "rank", "state", "round", "heard", "incarnation")
    for rank in group.ranks:
        heard = "never" if rank.last_heard_s is None else f"{rank.last_heard_s:.1f} s ago"
        table.add_row(str(rank.rank), _plain(rank.state), str(rank.round), heard, _plain(rank.incarnation))
    return table


def _pages(group: GroupSnapshot) -> list[RenderableType]:
    if not group.free_pages:
        return []
    return [Text(f"pages free on every rank of {group.name}: {_counts(group.free_pages)}")]


def _worker(snapshot: WorkerSnapshot) -> list[RenderableType]:
    state = _table(
        "rank", "state", "epoch", "step", "coordinator", "open", "leases", "commits", "aborts", "divergences"
    )
    state.add_row(
        _plain(snapshot.state),
        str(snapshot.epoch),
        str(snapshot.round),
        str(snapshot.operations_open),
        str(snapshot.leases_open),
        str(_total(snapshot.decisions, Outcome.COMMIT)),
        _aborts(snapshot.decisions),
        str(snapshot.divergences),
    )
    pools = _table("pools", "pool", "tier", "pages", "free", "reserved", "used", "quarantined")
    for pool in snapshot.pools:
        numbers = (pool.capacity, pool.free, pool.reserved, pool.used, pool.quarantined)
        pools.add_row(_plain(pool.name), pool.tier.value, *(f"{number:,}" for number in numbers))
    copies = _table("copies", "direction", "copies", "failed", "pages", "bytes")
    for copy in snapshot.copies:
        copies.add_row(
            copy.direction, *(f"{number:,}" for number in (copy.transfers, copy.failed, copy.pages, copy.bytes))
        )
    hits = ", ".join(f"{tier} {pages:,}" for tier, pages in sorted(snapshot.pages_hit.items())) or "none"
    coordinator = Text(f"its coordinator: {snapshot.coordinator or 'none'}")
    return [coordinator, state, pools, copies, Text(f"pages looked up {snapshot.pages_requested:,}, hit: {hits}")]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _total(decisions: list[DecisionCount], outcome: Outcome) -> int:
    return sum(decision.count for decision in decisions if decision.outcome is outcome)


def _aborts(decisions: list[DecisionCount]) -> str:
    reasons: dict[str, int] = {}
    for decision in decisions:
        if decision.outcome is Outcome.ABORT:
            reason = str(decision.reason)
            reasons[reason] = reasons.get(reason, 0) + decision.count
    total = sum(reasons.values())
    return f"{total} ({_counts(reasons)})" if reasons else "0"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _plain(text: str) -> str:
    """Text that comes from another process: nothing in it is markup, nothing moves the cursor."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return printable.replace("[", "\\[")
