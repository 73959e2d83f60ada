"""What takes part in the agreement benchmark on one rank: kvcoord in its two places, and its peers.

Every act is a function of a name, the same on all ranks and used once, and of a number of votes. `immediate` returns
when all ranks agree on a number. `step` says what a scheduler step has to say and takes what it is due. `covered` takes
pages that the group is known to have. Knows nothing of time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvcoord.client import Allocation, Ticket, connect_blocking
from kvcoord.config.group import GroupConfig
from kvcoord.config.process import WorkerConfig
from kvcoord.domain import Agreement, OperationKind
from kvcoord.load.bench.dialogue import Act, RankPlan, Subject
from kvcoord.load.bench.star import StarMember
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.ledger import Ledger
from kvcoord.protocol.messages import Vote
from kvcoord.runtime.member import Member

PAGES: Final = 4096
FREE: Final = (PAGES, PAGES)

Perform = Callable[[str, int], object]
Acts = dict[tuple[Subject, Act, int], Perform]
"""What to call for each subject, act and lag (0 where the lag makes no difference)."""


def group_config(name: str, ranks: int, lag: int) -> GroupConfig:
    return GroupConfig(name=name, world_size=ranks, lag=lag)


class MemberSubject:
    """The engine's thread beside a member's thread in one process: nothing else is needed on the rank."""

    def __init__(self, plan: RankPlan, lag: int) -> None:
        group = group_config(f"bench-lag{lag}", plan.ranks, lag)
        config = WorkerConfig(group=group, rank=plan.rank, coordinators=[plan.coordinator], http=None)
        self._lag = lag
        self._step = 0
        self._member = Member(config, {"lag": lag}, events=Digest().log)
        self._member.open(FREE)

    def immediate(self, name: str, votes: int) -> None:
        self._member.decide(Vote(name, OperationKind.CUSTOM, True, Agreement.MIN, value=votes))

    def step(self, name: str, votes: int) -> None:
        step, member = self._step, self._member
        self._step = step + 1
        if step >= self._lag:
            member.take(step - self._lag)
        said = [Vote(f"{name}/{number}", OperationKind.CUSTOM, True) for number in range(votes)]
        member.send(step, list(FREE), 0, said, [])

    def close(self) -> None:
        self._member.close()


class SidecarSubject:
    """The engine's thread and its worker process, through the blocking client."""

    def __init__(self, address: str) -> None:
        self._client = connect_blocking(address)
        self._client.register()
        self._step = 0
        self._due: list[Ticket[Any]] = []
        self._allocated: Allocation | None = None

    def immediate(self, name: str, votes: int) -> None:
        self._client.agree(name, True, agreement=Agreement.MIN, value=votes)

    def step(self, name: str, votes: int) -> None:
        """Waits for the worker's answer."""
        self.step_later(name, votes)
        self._wait_for_due()

    def step_later(self, name: str, votes: int) -> None:
        """Reads the worker's answer to the step before, and does not wait for this one's."""
        self._wait_for_due()
        client = self._client
        for number in range(votes):
            client.agree_nowait(f"{name}/{number}", True, deferred=True)
        self._due.append(client.advance_nowait(self._step))
        client.flush()
        self._step += 1

    def covered(self, name: str, votes: int) -> None:
        """So many allocations of a page in one message, which also gives back those of the message before."""
        client = self._client
        tickets = [client.allocate_nowait(1) for _ in range(votes)]
        freed = [client.free_nowait(allocated.slots) for allocated in client.flush_wait(tickets)]
        client.flush_wait(freed)

    def close(self) -> None:
        self._client.close()

    def _wait_for_due(self) -> None:
        due, self._due = self._due, []
        for ticket in due:
            ticket.wait()


class CoveredSubject:
    """What a covered operation costs an engine that is a member itself: the ledger and the digest, no message."""

    def __init__(self) -> None:
        self._ledger = Ledger(len(FREE))
        self._ledger.begin(FREE)
        self._digest = Digest()

    def covered(self, name: str, votes: int) -> None:
        ledger, digest = self._ledger, self._digest
        for _ in range(votes):
            if ledger.available(0) >= 1:
                ledger.issue(0, 1)
                digest.apply(f"commit {name} 1")
                ledger.credit(0, 1)


class GlooSubject:
    """One blocking all_reduce(MIN) of as many numbers as a frame would carry."""

    def __init__(self, plan: RankPlan) -> None:
        from kvcoord.load.gloo import join_process_group, minimum

        group = group_config("gloo", plan.ranks, 1)
        join_process_group(WorkerConfig(group=group, rank=plan.rank, http=None), Path(plan.gloo_store))
        self._minimum = minimum

    def immediate(self, name: str, votes: int) -> None:
        self._minimum([votes])

    def step(self, name: str, votes: int) -> None:
        self._minimum([*FREE, 0, *([1] * votes)])


def open_subjects(plan: RankPlan) -> tuple[Acts, list[Callable[[], None]]]:
    """Opens everything of the plan, in the same order on all ranks. Returns what can be done, and what to close."""
    acts: Acts = {(Subject.LEDGER, Act.COVERED, 0): CoveredSubject().covered}
    closing: list[Callable[[], None]] = []
    if plan.gloo_store:
        gloo = GlooSubject(plan)
        acts[Subject.GLOO, Act.IMMEDIATE, 0] = gloo.immediate
        acts[Subject.GLOO, Act.STEP, 0] = gloo.step
    for lag in plan.lags:
        member = MemberSubject(plan, lag)
        closing.append(member.close)
        acts[Subject.MEMBER, Act.STEP, lag] = member.step
        acts.setdefault((Subject.MEMBER, Act.IMMEDIATE, 0), member.immediate)
    if plan.sidecar:
        sidecar = SidecarSubject(plan.sidecar)
        closing.append(sidecar.close)
        acts[Subject.SIDECAR, Act.IMMEDIATE, 0] = sidecar.immediate
        acts[Subject.SIDECAR, Act.STEP, 0] = sidecar.step
        acts[Subject.SIDECAR, Act.COVERED, 0] = sidecar.covered
        acts[Subject.SIDECAR_LATER, Act.STEP, 0] = sidecar.step_later
    if plan.star_path:
        star = StarMember(plan.star_path)
        closing.append(star.close)
        acts[Subject.STAR, Act.IMMEDIATE, 0] = lambda _, votes: star.smallest(votes)
    return acts, closing
