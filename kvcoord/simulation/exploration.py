"""Every order of events of a small group, over the production machines of the protocol.

A state is the nodes, the messages on their way, and how many faults are left. A message stays on its way until it is
taken, in any order, or for ever: a lost message is one that is never taken. What one node makes of one event is worked
out once and remembered, so millions of states cost few steps of the machines.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kvcoord.domain import Outcome
from kvcoord.simulation.freeze import freeze
from kvcoord.simulation.nodes import CoordinatorNode, Mail, Node, RankNode, thaw
from kvcoord.simulation.scopes import FAULTS, SCOPES, Scope

Event = tuple[str | int, ...]
State = tuple[tuple[int, ...], frozenset[int], tuple[int, ...]]
"""Node numbers, mail numbers, faults left."""


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """`complete`: there are no other states. `commits` and `aborts`: states in which some rank knows of one."""

    scope: str
    states: int
    complete: bool
    commits: int
    aborts: int
    violation: str = ""
    path: list[str] = []


class Seen(msgspec.Struct, frozen=True):
    """What can be seen of one rank from outside, at one of its states."""

    rank: int
    history: int
    outcomes: dict[str, Outcome]
    ends: dict[str, bool]
    voted: frozenset[str]
    landed: frozenset[str]


class Explorer:
    """One search. `broken` says what is wrong with a state, empty when nothing is."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._snapshots: list[bytes] = []
        self._numbers: dict[object, int] = {}
        self._seen_of: dict[int, Seen | None] = {}
        self._mails: list[Mail] = []
        self._mail_numbers: dict[Mail, int] = {}
        self._known: dict[tuple[int, Event], tuple[int, tuple[int, ...], str]] = {}
        self._enabled: dict[int, list[Event]] = {}
        self._incarnations = 100

    def explore(self) -> Explored:
        """Breadth first, so that a violation is found by a shortest path."""
        start = self._joined()
        parents: dict[State, tuple[State, Event] | None] = {start: None}
        todo = deque([start])
        commits = aborts = 0
        while todo:
            state = todo.popleft()
            for event, following, problem in self._successors(state):
                if problem or following not in parents:
                    problem = problem or self._broken(following)
                    if problem:
                        path = [*_path(parents, state), _shown(event)]
                        return self._result(len(parents), False, commits, aborts, problem, path)
                    parents[following] = (state, event)
                    todo.append(following)
                    outcomes = self._outcomes(following)
                    commits += Outcome.COMMIT in outcomes
                    aborts += Outcome.ABORT in outcomes
            if len(parents) >= self.scope.states_max:
                return self._result(len(parents), False, commits, aborts, "", [])
        return self._result(len(parents), True, commits, aborts, "", [])

    def _result(
        self, states: int, complete: bool, commits: int, aborts: int, violation: str, path: list[str]
    ) -> Explored:
        return Explored(
            scope=self.scope.name,
            states=states,
            complete=complete,
            commits=commits,
            aborts=aborts,
            violation=violation,
            path=path,
        )

    # --- states ---------------------------------------------------------------------------------------------------

    def _joined(self) -> State:
        """All ranks have joined the first coordinator, and nothing is on its way."""
        scope = self.scope
        ranks = [
            RankNode(rank, scope.ranks, scope.coordinators, rank + 1, lockstep=scope.lockstep)
            for rank in range(scope.ranks)
        ]
        coordinators = [CoordinatorNode(index, 10 + index) for index in range(scope.coordinators)]
        nodes: list[Node] = [*ranks, *coordinators]
        mails = deque(mail for rank in ranks for mail in rank.start())
        while mails:
            mail = mails.popleft()
            mails.extend(nodes[mail.receiver].hear(mail))
        budgets = tuple(getattr(scope, fault) for fault in FAULTS)
        return tuple(self._number(node) for node in nodes), frozenset(), budgets

    def _number(self, node: Node) -> int:
        frozen = freeze(node)
        number = self._numbers.get(frozen)
        if number is None:
            number = self._numbers[frozen] = len(self._snapshots)
            self._snapshots.append(pickle.dumps(node))
            self._seen_of[number] = _seen(node) if isinstance(node, RankNode) else None
        return number

    def _mail_number(self, mail: Mail) -> int:
        number = self._mail_numbers.get(mail)
        if number is None:
            number = self._mail_numbers[mail] = len(self._mails)
            self._mails.append(mail)
        return number

    # --- events ---------------------------------------------------------------------------------------------------

    def _successors(self, state: State) -> Iterator[tuple[Event, State, str]]:
        nodes, mails, budgets = state
        for mail in sorted(mails):
            receiver = self._mails[mail].receiver
            yield self._follow(state, receiver, ("hear", mail), mails - {mail}, budgets)
            if budgets[_TWICE]:
                yield self._follow(state, receiver, ("hear", mail), mails, _less(budgets, _TWICE))
        for at, number in enumerate(nodes):
            for event in self._events(number):
                fault = _FAULT_OF.get(str(event[0]))
                if fault is None:
                    yield self._follow(state, at, event, mails, budgets)
                elif budgets[fault]:
                    yield self._follow(state, at, event, mails, _less(budgets, fault))

    def _follow(
        self, state: State, at: int, event: Event, mails: frozenset[int], budgets: tuple[int, ...]
    ) -> tuple[Event, State, str]:
        nodes = state[0]
        number, sent, problem = self._step(nodes[at], event)
        changed = (*nodes[:at], number, *nodes[at + 1 :])
        return (at, *event), (changed, mails.union(sent), budgets), problem

    def _step(self, number: int, event: Event) -> tuple[int, tuple[int, ...], str]:
        """What a node makes of an event: its next state and what it sends."""
        known = self._known.get((number, event))
        if known is None:
            node = thaw(self._snapshots[number])
            try:
                node, sent = self._do(node, event)
                known = (self._number(node), tuple(sorted(self._mail_number(mail) for mail in sent)), "")
            except Exception as error:
                known = (number, (), f"{type(error).__name__}: {error}")
            self._known[number, event] = known
        return known

    def _do(self, node: Node, event: Event) -> tuple[Node, list[Mail]]:
        kind = event[0]
        if kind == "hear":
            return node, node.hear(self._mails[int(event[1])])
        if isinstance(node, CoordinatorNode):
            return self._do_coordinator(node, event)
        return self._do_rank(node, event)

    def _do_coordinator(self, node: CoordinatorNode, event: Event) -> tuple[Node, list[Mail]]:
        if event[0] == "crash":
            return CoordinatorNode(node.index, node.machine.incarnation + 100), []
        if event[0] == "lose":
            return node, node.lose(str(event[1]).encode())
        return node, node.time_out()

    def _do_rank(self, node: RankNode, event: Event) -> tuple[Node, list[Mail]]:
        kind = event[0]
        if kind == "restart":
            who = node.machine.identity
            coordinators, lockstep = self.scope.coordinators, self.scope.lockstep
            following = RankNode(node.rank, node.ranks, coordinators, who.incarnation + 100, lockstep=lockstep)
            return following, following.start()
        if kind == "vote":
            return node, node.vote(str(event[1]))
        if kind in ("land", "fail"):
            return node, node.copy_ended(str(event[1]), kind == "land")
        if kind == "step":
            operation = f"op{node.step}" if node.step < self.scope.operations else None
            return node, node.step_once(operation)
        return node, node.suspect() if kind == "suspect" else node.repeat()

    def _events(self, number: int) -> list[Event]:
        """What a node may do of itself."""
        events = self._enabled.get(number)
        if events is None:
            node = thaw(self._snapshots[number])
            found = self._rank_events(node) if isinstance(node, RankNode) else _coordinator_events(node)
            events = self._enabled[number] = list(found)
        return events

    def _rank_events(self, node: RankNode) -> Iterator[Event]:
        if self.scope.lockstep:
            if node.step < self.scope.steps and node.may_step():
                yield ("step",)
        elif node.machine.history:
            for operation in (f"op{number}" for number in range(self.scope.operations)):
                if operation not in node.voted and operation not in node.outcomes:
                    yield "vote", operation
        for operation in node.copying:
            yield "land", operation
            yield "fail", operation
        if self.scope.coordinators > 1:
            yield ("suspect",)
        yield ("restart",)
        yield ("repeat",)

    # --- promises -------------------------------------------------------------------------------------------------

    def _outcomes(self, state: State) -> set[Outcome]:
        ranks = (self._seen_of[number] for number in state[0])
        return {outcome for seen in ranks if seen is not None for outcome in seen.outcomes.values()}

    def _broken(self, state: State) -> str:
        """Agreement, Validity and Visibility between the ranks of one history."""
        ranks = [seen for seen in (self._seen_of[number] for number in state[0]) if seen is not None]
        for one in ranks:
            for other in ranks:
                problem = _compare(one, other) if one.history == other.history else ""
                if problem:
                    return problem
        return ""


def _seen(node: RankNode) -> Seen:
    return Seen(
        node.rank,
        node.machine.history,
        dict(node.outcomes),
        dict(node.ends),
        frozenset(node.voted),
        frozenset(node.landed),
    )


def _compare(one: Seen, other: Seen) -> str:
    for operation, outcome in one.outcomes.items():
        if other.outcomes.get(operation, outcome) is not outcome:
            return f"agreement: {operation} is {outcome} on rank {one.rank}, not on rank {other.rank}"
        if outcome is Outcome.COMMIT and operation not in other.voted:
            return f"validity: {operation} commits and rank {other.rank} has not voted"
    for operation, completed in one.ends.items():
        if other.ends.get(operation, completed) is not completed:
            return f"agreement: {operation} completed on one of ranks {one.rank} and {other.rank} only"
        if completed and operation not in other.landed:
            return f"visibility: rank {one.rank} publishes {operation}, not copied by rank {other.rank}"
    return ""


def _coordinator_events(node: CoordinatorNode) -> Iterator[Event]:
    yield ("crash",)
    if node.waits_for_votes():
        yield ("time_out",)
    for peer in node.peers():
        yield "lose", peer.decode()


_TWICE: Final = FAULTS.index("twice")
_FAULT_OF: Final = {fault: number for number, fault in enumerate(FAULTS)}


def _less(budgets: tuple[int, ...], fault: int) -> tuple[int, ...]:
    return (*budgets[:fault], budgets[fault] - 1, *budgets[fault + 1 :])


def _path(parents: dict[State, tuple[State, Event] | None], state: State) -> list[str]:
    path = []
    at = parents[state]
    while at is not None:
        state, event = at
        path.append(_shown(event))
        at = parents[state]
    return path[::-1]


def _shown(event: Event) -> str:
    return " ".join(map(str, event))


def explore_scopes(on_explored: Callable[[Explored], None] = lambda explored: None) -> list[Explored]:
    """Explores every scope in turn."""
    found = []
    for scope in SCOPES:
        explored = Explorer(scope).explore()
        on_explored(explored)
        found.append(explored)
    return found
