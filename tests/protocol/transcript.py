"""Transcripts: commands to a cluster and what then happened, as text that is reviewed as a diff.

A file is blocks: command lines, a line `----`, the printed result, an empty line. `#` begins a comment. Heartbeats and
their answers are not printed, and what is said again while time passes is printed once a block. Commands:

    group ranks=2 [coordinators=1] [lockstep=yes] [lag=1] [free=8,4] [limits...]   a cluster, not started
    process NAME rank=0 [world_size=3] [free=1] [lockstep=yes] [FIELD=VALUE]       one more process for a rank
    start [NAME ...]      deliver [to=X] [from=X] [kind=Prepare]      drop, repeat: the same choice
    advance SECONDS       join (start, deliver, print states only)    states
    vote NAME OP yes|no [agreement=min] [value=3] [keys=a,b] [ranks=0,1] [reason=host_full] [short=kv:2] [kind=custom]
    defer NAME OP ...     ack NAME OP ok|failed [ranks=0,1]           frame NAME STEP [free=8] [digest=1]
    log NAME EVENT:DIGEST ...    leave NAME    gone NAME    absent NAME    kill NAME    crash 0    restart 0    counters
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvcoord.domain import Agreement, OperationKind, Outcome, Reason
from kvcoord.protocol.effects import Apply
from kvcoord.protocol.group import GroupLimits
from kvcoord.protocol.messages import Ack, Alive, Heartbeat, Vote
from kvcoord.protocol.rank import RankLimits
from tests.protocol.cluster import Cluster, Envelope
from tests.protocol.show import show

SEPARATOR: Final = "----"


def replay(text: str) -> str:
    """The same transcript with the results that the machines give now."""
    session = Session()
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        commands = block.split(f"\n{SEPARATOR}")[0].split("\n")
        if not any(_words(line) for line in commands):
            blocks.append("\n".join(commands))
            continue
        blocks.append("\n".join([*commands, SEPARATOR, *session.run(commands)]))
    return "\n\n".join(blocks) + "\n"


def replay_file(path: Path) -> tuple[str, str]:
    """(what the file says, what it should say)"""
    text = path.read_text()
    return text, replay(text)


def _words(line: str) -> list[str]:
    return line.split("#")[0].split()


def _mask(ranks: str) -> int:
    return sum(1 << int(rank) for rank in ranks.split(",")) if ranks else 0


class Session:
    """Runs commands and collects what happens."""

    def __init__(self) -> None:
        self._cluster = Cluster(0)
        self._lines: list[str] = []

    def run(self, commands: list[str]) -> list[str]:
        self._lines = []
        for line in commands:
            words = _words(line)
            if words:
                plain = [word for word in words[1:] if "=" not in word]
                options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
                getattr(self, f"_do_{words[0]}")(plain, options)
        return self._lines

    def _note(self, who: str, what: object) -> None:
        if isinstance(what, Envelope):
            if not _is_pulse(what):
                self._lines.append(f"{what.sender} > {what.receiver}: {show(what.message)}")
        elif isinstance(what, Apply):
            self._lines.append(f"  {who} applies {show(what.entry)}")
        else:
            self._lines.append(f"  {who} {show(what)}")

    # --- processes ------------------------------------------------------------------------------------------------

    def _do_group(self, plain: list[str], options: dict[str, str]) -> None:
        ranks = int(options.pop("ranks"))
        coordinators = int(options.pop("coordinators", "1"))
        lockstep = options.pop("lockstep", "no") == "yes"
        lag = int(options.pop("lag", "1"))
        free = [int(count) for count in options.pop("free", "8").split(",")]
        numbers = {name: float(value) if name.endswith("_s") else int(value) for name, value in options.items()}
        shared = {name: value for name, value in numbers.items() if name in GroupLimits.__struct_fields__}
        own = {name: value for name, value in numbers.items() if name in RankLimits.__struct_fields__}
        assert numbers.keys() == shared.keys() | own.keys(), f"unknown limits in {options}"
        self._cluster = Cluster(
            ranks,
            coordinators,
            lockstep=lockstep,
            lag=lag,
            free=free,
            limits=GroupLimits(**shared),  # type: ignore[arg-type]
            rank_limits=RankLimits(**own),  # type: ignore[arg-type]
        )
        self._cluster.note = self._note

    def _do_process(self, plain: list[str], options: dict[str, str]) -> None:
        rank = int(options.pop("rank"))
        size = int(options.pop("world_size", "0")) or None
        free = [int(count) for count in options.pop("free", "").split(",") if count] or None
        lockstep = {"": None, "yes": True, "no": False}[options.pop("lockstep", "")]
        fields: dict[str, str | int] = {key: int(v) if v.isdigit() else v for key, v in options.items()}
        self._cluster.add(plain[0], rank, world_size=size, fingerprint=fields, free=free, lockstep=lockstep)

    def _do_start(self, plain: list[str], options: dict[str, str]) -> None:
        self._cluster.start(*plain)

    def _do_join(self, plain: list[str], options: dict[str, str]) -> None:
        self._cluster.start()
        self._cluster.settle()
        self._lines.clear()
        self._do_states(plain, options)

    def _do_kill(self, plain: list[str], options: dict[str, str]) -> None:
        self._cluster.kill(plain[0])

    def _do_crash(self, plain: list[str], options: dict[str, str]) -> None:
        self._cluster.crash(int(plain[0]))

    def _do_restart(self, plain: list[str], options: dict[str, str]) -> None:
        self._cluster.restart(int(plain[0]))

    def _do_leave(self, plain: list[str], options: dict[str, str]) -> None:
        rank = self._cluster.ranks[plain[0]]
        self._cluster.perform(rank, rank.machine.leave(self._cluster.now))

    def _do_gone(self, plain: list[str], options: dict[str, str]) -> None:
        """The transport tells both sides that the connection is lost."""
        rank = self._cluster.ranks[plain[0]]
        self._cluster.lose_connection(rank)

    def _do_absent(self, plain: list[str], options: dict[str, str]) -> None:
        """What is due at once happens; then the transport says that nobody is at the coordinator's address."""
        rank = self._cluster.ranks[plain[0]]
        self._cluster.perform(rank, rank.machine.tick(self._cluster.now))
        self._cluster.perform(rank, rank.machine.absent(self._cluster.now))

    # --- network and time -----------------------------------------------------------------------------------------

    def _do_deliver(self, plain: list[str], options: dict[str, str]) -> None:
        self._cluster.settle(_choice(options))

    def _do_drop(self, plain: list[str], options: dict[str, str]) -> None:
        self._lines.append(f"dropped {self._cluster.drop(_choice(options))}")

    def _do_repeat(self, plain: list[str], options: dict[str, str]) -> None:
        """Doubles messages on their way."""
        wanted = _choice(options)
        wire = self._cluster.wire
        wire[:] = [copy for envelope in wire for copy in ([envelope, envelope] if wanted(envelope) else [envelope])]

    def _do_advance(self, plain: list[str], options: dict[str, str]) -> None:
        before, self._lines = self._lines, []
        self._cluster.advance(float(plain[0]))
        self._lines = before + [line for line in dict.fromkeys(self._lines) if line not in before]

    # --- what owners say ------------------------------------------------------------------------------------------

    def _do_vote(self, plain: list[str], options: dict[str, str]) -> None:
        rank = self._cluster.ranks[plain[0]]
        self._cluster.perform(rank, rank.machine.vote(_vote(plain, options), self._cluster.now))

    def _do_defer(self, plain: list[str], options: dict[str, str]) -> None:
        self._cluster.ranks[plain[0]].machine.defer(_vote(plain, options))

    def _do_ack(self, plain: list[str], options: dict[str, str]) -> None:
        name, operation, how = plain
        ok = how == "ok"
        ack = Ack(operation, ok, None if ok else Reason.COPY_FAILED, _mask(options.get("ranks", "")))
        rank = self._cluster.ranks[name]
        self._cluster.perform(rank, rank.machine.ack(ack, self._cluster.now))

    def _do_frame(self, plain: list[str], options: dict[str, str]) -> None:
        rank = self._cluster.ranks[plain[0]]
        free = [int(count) for count in options.get("free", "8").split(",")]
        digest = int(options.get("digest", "1"))
        self._cluster.perform(rank, rank.machine.frame(int(plain[1]), free, digest, self._cluster.now))

    def _do_log(self, plain: list[str], options: dict[str, str]) -> None:
        """What this rank will answer when its log is asked for."""
        events = [event.rsplit(":", 1) for event in plain[1:]]
        self._cluster.ranks[plain[0]].log = [("", 1), *((event, int(digest)) for event, digest in events)]

    # --- questions ------------------------------------------------------------------------------------------------

    def _do_states(self, plain: list[str], options: dict[str, str]) -> None:
        for rank in self._cluster.ranks.values():
            machine = rank.machine
            words = [rank.name, machine.state.value if rank.alive else "down", f"at c{rank.coordinator}"]
            self._lines.append(" ".join([*words, show_epoch(machine.epoch), machine.cause]).rstrip())
        for coordinator in self._cluster.coordinators:
            groups = coordinator.machine.groups.values() if coordinator.machine else ()
            for group in groups:
                words = [coordinator.name, group.state.value, show_epoch(group.epoch), f"ranks {sorted(group.members)}"]
                self._lines.append(" ".join([*words, group.cause]).rstrip())

    def _do_counters(self, plain: list[str], options: dict[str, str]) -> None:
        for coordinator in self._cluster.coordinators:
            for group in coordinator.machine.groups.values() if coordinator.machine else ():
                commits = sum(n for (_, outcome, _), n in group.decisions.items() if outcome is Outcome.COMMIT)
                aborts = sum(group.decisions.values()) - commits
                ends = {"completions": 0, "retractions": sum(group.retractions.values()), **group.counters}
                decided = {"commits": commits, "aborts": aborts, **ends}
                counts = {**decided, **group.ignored, **group.stream.ignored, **group.rounds.ignored}
                counts["transfers_ignored"] = group.transfers.ignored
                said = " ".join(f"{name}={count}" for name, count in counts.items() if count)
                self._lines.append(f"{coordinator.name} {said}")
        for rank in self._cluster.ranks.values():
            machine = rank.machine
            counts = {**machine.ignored, **machine.stream.ignored, **machine.rounds.ignored}
            if counts:
                self._lines.append(f"{rank.name} " + " ".join(f"{name}={count}" for name, count in counts.items()))


def show_epoch(epoch: int) -> str:
    return f"epoch={epoch >> 40}@{epoch & ((1 << 40) - 1)}"


def _vote(plain: list[str], options: dict[str, str]) -> Vote:
    _, operation, yes = plain
    value: int | list[bytes] | None = int(options["value"]) if "value" in options else None
    if "keys" in options:
        value = [key.encode() for key in options["keys"].split(",") if key]
    short = dict(item.split(":") for item in options.get("short", "").split(",") if item)
    return Vote(
        operation,
        OperationKind(options.get("kind", "write-through")),
        yes == "yes",
        Agreement(options.get("agreement", "all")),
        _mask(options.get("ranks", "")),
        value,
        Reason(options["reason"]) if "reason" in options else None,
        {pool: int(pages) for pool, pages in short.items()},
    )


def _choice(options: dict[str, str]) -> Callable[[Envelope], bool]:
    to, sender, kind = options.get("to"), options.get("from"), options.get("kind")

    def wanted(envelope: Envelope) -> bool:
        return (
            to in (None, envelope.receiver)
            and sender in (None, envelope.sender)
            and kind in (None, type(envelope.message).__name__)
        )

    return wanted


def _is_pulse(envelope: Envelope) -> bool:
    return isinstance(envelope.message, Heartbeat | Alive) and not envelope.message.probe
