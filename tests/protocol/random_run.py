"""One run of a group over a bad network, from a seed: messages are lost, doubled and reordered, processes die.

Ranks put operations to the vote and copy what is committed; in lockstep they also step. After the faults the network is
quiet, and all that was begun has to end. What must hold at every moment is checked as it happens.
"""

import random
from collections.abc import Iterator

from kvcoord.domain import Agreement, OperationId, OperationKind, Outcome, Reason
from kvcoord.domain import Rank as RankNumber
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.effects import Activated, Apply
from kvcoord.protocol.messages import Ack, Alive, Completion, Entry, Heartbeat, Verdict, Vote
from kvcoord.protocol.rank import RankLimits
from tests.protocol.cluster import Cluster, Envelope, Rank
from tests.protocol.show import show

AGREEMENTS = (Agreement.ALL, Agreement.MIN, Agreement.MAX, Agreement.INTERSECT, Agreement.EQUAL)
QUIET_S_MAX = 200.0
STEPS_WITH_VOTES = 25


class Owner:
    """What stands above one rank's machine: votes, copies and acks, and in lockstep an engine that steps."""

    def __init__(self, rank: Rank, number: RankNumber, seed: int) -> None:
        self.rank = rank
        self.number = number
        self.copying: list[Ack] = []
        self.acked_ok: set[OperationId] = set()
        self.ends: dict[OperationId, list[tuple[bool, bool]]] = {}
        self.digest = Digest()
        self.step = 0
        self.undecided: set[OperationId] = set()
        self._random = random.Random(seed)
        self._seen = 0

    def begin(self) -> None:
        """A new history: all that was is void. The engine starts anew."""
        self.copying.clear()
        self.acked_ok.clear()
        self.ends.clear()
        self.undecided.clear()
        self.digest.begin()
        self.step = 0

    def replaced_by(self, rank: Rank) -> None:
        """The process has died, and this is its next life."""
        self.rank = rank
        self._seen = 0
        self.begin()

    def vote(self, operation: OperationId, participants: int, agreement: Agreement) -> Vote:
        value: int | list[bytes] | None = None
        if agreement is Agreement.EQUAL:
            value = 7
        elif agreement is Agreement.INTERSECT:
            value = [b"a", b"b", bytes([99 + self.number])]
        elif agreement is not Agreement.ALL:
            value = 10 + self.number
        self.undecided.add(operation)
        if self._random.random() < 0.1:
            return Vote(operation, OperationKind.WRITE_THROUGH, False, agreement, participants, None, Reason.HOST_FULL)
        return Vote(operation, OperationKind.WRITE_THROUGH, True, agreement, participants, value)

    def news(self) -> Iterator[Entry]:
        """Stream entries that have come since the last time."""
        told, self._seen = self.rank.told[self._seen :], len(self.rank.told)
        for effect in told:
            if isinstance(effect, Activated) and effect.fresh:
                self.begin()
            elif isinstance(effect, Apply):
                yield effect.entry

    def take(self, entry: Entry, participants: int) -> None:
        if isinstance(entry, Completion):
            self._ended(entry)
            return
        self.undecided.discard(entry.operation)
        if entry.outcome is Outcome.COMMIT and participants >> self.number & 1:
            ok = self._random.random() < 0.9
            self.copying.append(Ack(entry.operation, ok, None if ok else Reason.COPY_FAILED, participants))

    def _ended(self, completion: Completion) -> None:
        ends = self.ends.setdefault(completion.operation, [])
        if (completion.ok, completion.drained) == (False, False) and ends:
            assert ends[-1] == (False, False), f"{completion} after {ends}"
            return
        assert all(end == (False, False) for end in ends), f"{completion} after {ends}"
        assert not (completion.ok and ends), f"{completion.operation} was retracted and then completed"
        ends.append((completion.ok, completion.drained))

    def copy_ended(self, now: float) -> None:
        ack = self.copying.pop(self._random.randrange(len(self.copying)))
        if ack.ok:
            self.acked_ok.add(ack.operation)
        self.effects = self.rank.machine.ack(ack, now)


class Run:
    """`play` does one run; `trace` says what happened, newest last."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        lockstep = self.random.random() < 0.5
        limits = RankLimits(join_timeout_s=1e6, group_deadline_s=1e6)
        self.cluster = Cluster(
            self.random.randint(2, 4),
            self.random.randint(1, 2),
            lockstep=lockstep,
            lag=self.random.randint(1, 2),
            rank_limits=limits,
        )
        self.loss = self.random.choice((0.0, 0.02, 0.1)) if faults else 0.0
        self.disorder = self.random.choice((0.0, 0.3)) if faults else 0.0
        self.restarts = self.random.choice((0.0, 0.01)) if faults else 0.0
        self.owners = {
            name: Owner(rank, number, seed * 10 + number)
            for number, (name, rank) in enumerate(self.cluster.ranks.items())
        }
        self.verdicts: dict[tuple[int, int], object] = {}
        self.trace: list[str] = []
        self._operations = 0
        self._votes_left: list[tuple[str, Vote]] = []
        self.steps_max = 0
        self.masks: dict[OperationId, int] = {}
        self.cluster.note = self._note

    def _note(self, who: str, what: object) -> None:
        message = what.message if isinstance(what, Envelope) else what
        if not isinstance(message, Heartbeat | Alive):
            self.trace.append(f"{self.cluster.now:.2f} {who} {show(message)}")

    def play(self, moves: int = 250) -> None:
        self.cluster.start()
        self.steps_max = STEPS_WITH_VOTES
        for _ in range(moves):
            self._move()
        self._heal()

    # --- the bad time ---------------------------------------------------------------------------------------------

    def _move(self) -> None:
        dice = self.random.random()
        if dice < 0.70:
            self._deliver_one()
        elif dice < 0.80:
            self._advance(self.random.choice((0.05, 0.3, 0.3, 2.0)))
        elif dice < 0.86:
            self._put_operation()
        elif dice < 0.98:
            self._owners_work()
        elif self.random.random() < self.restarts * 30:
            self._break_something()
        self._listen()

    def _deliver_one(self) -> None:
        wire = self.cluster.wire
        if not wire:
            self._advance(0.1)
            return
        at = self.random.randrange(len(wire)) if self.random.random() < self.disorder else 0
        envelope = wire[at]
        if not (self.disorder and self.random.random() < 0.1):
            del wire[at]
        if self.random.random() < self.loss:
            self.trace.append(f"{self.cluster.now:.2f} lost {envelope.sender} {envelope.message}")
            return
        self.cluster.note(envelope.sender, envelope)
        self.cluster.deliver(envelope)

    def _advance(self, by_s: float) -> None:
        self.cluster.advance(by_s, then=lambda: None)

    def _put_operation(self) -> None:
        """Every participant will vote on it, each when it comes to it."""
        number = self._operations
        self._operations += 1
        names = list(self.owners)
        everyone = (1 << len(names)) - 1
        participants = self.random.choice((0, 0, 0, self.random.randint(1, everyone)))
        operation = f"op{number}"
        self.masks[operation] = participants or everyone
        for name in names:
            owner = self.owners[name]
            if self.masks[operation] >> owner.number & 1 and owner.rank.machine.history:
                vote = owner.vote(operation, participants, AGREEMENTS[number % 5])
                self._votes_left.append((name, vote))

    def _owners_work(self) -> None:
        self._vote(self.random.randint(0, len(self._votes_left)))
        for name, owner in self.owners.items():
            if self.random.random() < 0.6:
                self._step(name, owner)
            if owner.copying and self.random.random() < 0.5:
                owner.copy_ended(self.cluster.now)
                self.cluster.perform(owner.rank, owner.effects)

    def _break_something(self) -> None:
        if self.random.random() < 0.3:
            name = self.random.choice(list(self.owners))
            owner = self.owners[name]
            owner.replaced_by(self.cluster.replace(name))
            self.cluster.start(name)
            self.trace.append(f"{self.cluster.now:.2f} {name} restarted")
            return
        index = self.random.randrange(len(self.cluster.coordinators))
        if self.cluster.coordinators[index].machine is None or self.random.random() < 0.5:
            self.cluster.restart(index)
            self.trace.append(f"{self.cluster.now:.2f} c{index} restarted")
        else:
            self.cluster.crash(index)
            self.trace.append(f"{self.cluster.now:.2f} c{index} crashed")

    # --- owners ---------------------------------------------------------------------------------------------------

    def _vote(self, count: int) -> None:
        for name, vote in self._votes_left[:count]:
            owner = self.owners[name]
            if vote.operation in owner.undecided:
                self.cluster.perform(owner.rank, owner.rank.machine.vote(vote, self.cluster.now))
        del self._votes_left[:count]

    def _step(self, name: str, owner: Owner) -> None:
        """One step of a lockstep engine, if the verdict that it needs is there."""
        machine = owner.rank.machine
        if not machine.lockstep or not machine.history or owner.step >= self.steps_max:
            return
        due = machine.rounds.due(owner.step)
        if due is not None:
            verdict = machine.rounds.verdict(due)
            if verdict is None:
                return
            self._apply(owner, verdict)
        if owner.step % 2 == 0 and owner.step < STEPS_WITH_VOTES:
            operation = f"step{owner.step}"
            everyone = (1 << len(self.owners)) - 1
            participants = 0 if owner.step % 6 else (1 << (owner.step // 6 % len(self.owners)))
            self.masks[operation] = participants or everyone
            if self.masks[operation] >> owner.number & 1:
                machine.defer(owner.vote(operation, participants, AGREEMENTS[owner.step // 2 % 5]))
        frame = machine.frame(owner.step, [8 + owner.number], owner.digest.chain, self.cluster.now)
        owner.step += 1
        self.cluster.perform(owner.rank, frame)

    def _apply(self, owner: Owner, verdict: Verdict) -> None:
        content = (verdict.decisions, verdict.completions, verdict.capacity, verdict.absent)
        held = self.verdicts.setdefault((owner.rank.machine.history, verdict.round), content)
        assert held == content, f"verdict {verdict.round} is {held} and {content}"
        for completion in verdict.completions:
            owner.digest.apply(f"{completion.ok} {completion.operation}")
            owner.take(completion, self.masks[completion.operation])
        for decision in verdict.decisions:
            owner.rank.decide(decision)
            owner.digest.apply(f"{decision.outcome} {decision.operation} {decision.value}")
            owner.take(decision, self.masks[decision.operation])

    def _listen(self) -> None:
        """Owners hear what the stream has brought; outcomes of one operation are equal on all ranks that have one."""
        for owner in self.owners.values():
            for entry in owner.news():
                owner.take(entry, self.masks[entry.operation])
        outcomes: dict[tuple[int, OperationId], object] = {}
        for owner in self.owners.values():
            for operation, outcome in owner.rank.outcomes.items():
                held = outcomes.setdefault((owner.rank.machine.history, operation), outcome)
                assert held == outcome, f"{operation} is {held} and {outcome}"

    # --- the quiet time -------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        for index, coordinator in enumerate(self.cluster.coordinators):
            if coordinator.machine is None:
                self.cluster.restart(index)
        self.trace.append(f"{self.cluster.now:.2f} quiet from here")
        self.cluster.settle()
        self._listen()
        until = self.cluster.now + QUIET_S_MAX
        while why := self._open():
            assert self.cluster.now < until, why
            self._vote(len(self._votes_left))
            for name, owner in self.owners.items():
                self._step(name, owner)
                while owner.copying:
                    owner.copy_ended(self.cluster.now)
                    self.cluster.perform(owner.rank, owner.effects)
            self.cluster.settle()
            self._listen()
            self.cluster.advance(0.2)
            self._listen()

    def _open(self) -> str:
        """What has not ended yet, empty when everything has."""
        machines = [owner.rank.machine for owner in self.owners.values()]
        if not all(machine.active for machine in machines) or len({machine.epoch for machine in machines}) > 1:
            return "the group does not work"
        behind = [name for name, owner in self.owners.items() if owner.step < self.steps_max]
        if self.cluster.lockstep and behind:
            return f"{behind} do not step to {self.steps_max}"
        if self._votes_left or any(owner.copying for owner in self.owners.values()):
            return "owners have something to say"
        why = self._undecided() or self._unended()
        if why and self.cluster.lockstep:
            self.steps_max += 1
        return why or ("" if self._same_entries() else "ranks have not applied the same entries")

    def _undecided(self) -> str:
        for name, owner in self.owners.items():
            if owner.undecided:
                return f"{name} does not know what became of {sorted(owner.undecided)}"
        return ""

    def _unended(self) -> str:
        """A committed operation whose copies are over, and whose end some rank has not heard."""
        for name, owner in self.owners.items():
            for operation, (outcome, _) in owner.rank.outcomes.items():
                ends = owner.ends.get(operation, [])
                if outcome is Outcome.COMMIT and not (ends and (ends[-1][0] or ends[-1][1])):
                    return f"{name} does not know how the copies of {operation} ended: {ends}"
        return ""

    def _same_entries(self) -> bool:
        logs = [owner.rank.entries for owner in self.owners.values()]
        return all(log == logs[0] for log in logs)

    def check(self) -> None:
        """What must be true at the end, beyond what was checked on the way."""
        for owner in self.owners.values():
            for operation, ends in owner.ends.items():
                if ends[-1][0]:
                    members = [o for o in self.owners.values() if self.masks[operation] >> o.number & 1]
                    assert all(operation in o.acked_ok for o in members), f"{operation} completed too early"
        for coordinator in self.cluster.coordinators:
            assert coordinator.machine is not None
            for group in coordinator.machine.groups.values():
                assert group.divergence is None, group.divergence
