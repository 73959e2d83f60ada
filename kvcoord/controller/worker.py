"""The worker as a machine: an engine's calls in their order, the group's messages, the ends of copies, the time.

Calls are taken one after another. A call that needs the group's word (an immediate decision, a verdict that has not
come, a group that is not there yet) holds up the calls behind it and nothing else, so every rank goes through the same
calls at the same logical points. Messages, heartbeats and copies go on meanwhile.
"""

from collections import deque
from collections.abc import Callable

from kvcoord.config.limits import Limits
from kvcoord.controller.agreements import Agreements
from kvcoord.controller.cache import Cache
from kvcoord.controller.calls import advanced, page_keys, serve, serve_streaming
from kvcoord.controller.consensus import AgreedConsensus, Consensus
from kvcoord.controller.effects import CacheEffect, Reply, StartCopy
from kvcoord.controller.endings import difference, noted, refusal
from kvcoord.controller.host_tier import HostTier, keys_in_a_vote
from kvcoord.controller.kept import HostPages
from kvcoord.controller.patience import LIMIT, Patience
from kvcoord.controller.streaming import StreamingCache
from kvcoord.domain import DivergencePolicy, OperationId, Path, Reason
from kvcoord.errors import DeadlineExceeded, GroupLost, UsageError
from kvcoord.protocol.effects import (
    Activated,
    Apply,
    Attach,
    DivergenceSeen,
    GroupSuspended,
    JoinFailed,
    LogWanted,
    Lost,
    Note,
    RankEffect,
    SendUp,
)
from kvcoord.protocol.local import Advance, Agree, Call, Failed, Match, failed
from kvcoord.protocol.messages import Activate, Completion, Decision, Entry, FromCoordinator, Verdict
from kvcoord.protocol.rank import RankMachine, RankState

WorkerEffect = CacheEffect | SendUp | Attach | Note

LOG_EVENTS_MAX = 1024
"""Events that a rank sends when the coordinator asks what it has applied."""

MakeCache = Callable[[], tuple[Cache | StreamingCache, Consensus]]


class WorkerMachine:
    """One rank. `make_cache` gives empty cache logic, at the start and for each new history.

    `rank` None: a cache without a coordinator (a collective agrees for it).
    """

    def __init__(
        self,
        make_cache: MakeCache,
        rank: RankMachine | None,
        group: str,
        policy: DivergencePolicy,
        limits: Limits,
        copy_timeout_s: float,
    ) -> None:
        self.cache, self.consensus = make_cache()
        self.rank = rank
        self.group = group
        self.failure: Failed | None = None
        """Set once the group is lost, diverged or refused: every call is answered with it."""
        self.suspended = ""
        self.copies_open = 0
        self.step = -1
        self.divergences = 0
        self.renewals = 0
        self.first_divergence: DivergenceSeen | None = None
        self._make_cache = make_cache
        self._policy = policy
        self._pages_max = limits.pages_per_operation_max
        self._calls_max = limits.calls_waiting_max
        self._queue: deque[tuple[int, int, Call]] = deque()
        self._begun = rank is None
        self._unanswered: dict[tuple[int, int], None] = {}
        """Calls that were taken and wait for the group, or for copies."""
        self._renewed: Failed | None = None
        """Set when the group began anew under an engine: its calls are answered with it until it registers again."""
        self._last_cause = ""
        self._renewing = False
        self._early: list[Entry] = []
        """What the stream of a new history has brought before its cache was made."""
        self._activation: Activate | None = None
        self.host = HostTier(keys_in_a_vote(limits), self.cache.state.shares)
        self.host.settled = rank is None
        self._agreements = Agreements(limits.message_bytes_max // 4)
        self._patience = Patience(copy_timeout_s)
        self._now = 0.0
        self._said: list[RankEffect] = []
        """What the rank's machine wants done because of a call."""

    # --- events ---------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[WorkerEffect]:
        """Joins the group."""
        return self._after(self.rank.start(now) if self.rank else [], now)

    def call(self, session: int, number: int, call: Call, now: float) -> list[WorkerEffect]:
        """One call of the engine. Answered in this event or a later one, exactly once."""
        if len(self._queue) >= self._calls_max:
            fix = f"at most calls_waiting_max={self._calls_max} may wait: wait for answers first"
            self.cache.state.reply((session, number), failed(UsageError("calls", len(self._queue), fix)))
        elif self._renewed is not None and not isinstance(call, Match):
            self.cache.state.reply((session, number), self._renewed)
        else:
            self._queue.append((session, number, call))
        return self._after([], now)

    def receive(self, message: FromCoordinator, now: float) -> list[WorkerEffect]:
        """One message of the coordinator."""
        assert self.rank is not None
        return self._after(self.rank.receive(message, now), now)

    def copy_ended(self, operation: OperationId, error: Reason | None, now: float) -> list[WorkerEffect]:
        """This rank's copy of a committed operation is over."""
        self.copies_open -= 1
        self._tell(now)
        if not self._renewing:
            self.cache.copy_ended(operation, error)
        return self._after([], now)

    def hosts_mapped(self, history: int, now: float) -> list[WorkerEffect]:
        """What MapHosts of this history asked for is done."""
        self._tell(now)
        self.host.mapped(history, self.cache.state, self.consensus)
        return self._after([], now)

    def registered(self, model: str = "") -> None:
        """An engine begins its life: it holds nothing. `model` names what computes its pages."""
        self._renewed = None
        self.host.registered(model)

    def bequeath(self) -> HostPages:
        """The host pages for the machine that comes after this one, once its cache is abandoned and no copy runs."""
        return self.host.pages(self.cache.state)

    def closed(self, session: int) -> None:
        """The engine is gone: its calls need no answer."""
        self._queue = deque(held for held in self._queue if held[0] != session)
        self._unanswered = {who: None for who in self._unanswered if who[0] != session}

    def waiting(self) -> list[tuple[int, int, Call]]:
        """Takes out the calls that wait here: (session, number, call). For the machine that comes after this one."""
        held, self._queue = list(self._queue), deque()
        return held

    def leave(self, now: float) -> list[WorkerEffect]:
        return self._after(self.rank.leave(now) if self.rank else [], now)

    def disconnected(self, now: float) -> list[WorkerEffect]:
        """The connection to the coordinator is gone."""
        return self._after(self.rank.gone(now) if self.rank else [], now)

    def unconnected(self, now: float) -> list[WorkerEffect]:
        """Nobody is at the coordinator's address."""
        return self._after(self.rank.absent(now) if self.rank else [], now)

    def tick(self, now: float) -> list[WorkerEffect]:
        """Lets every deadline up to `now` pass. A rank whose copies hold up its engine for too long leaves."""
        effects = self.rank.tick(now) if self.rank else []
        self.cache.give_up(self._patience.late(now))
        if self._patience.over(now) and self.failure is None:
            late = DeadlineExceeded("end of the copies that calls wait for", LIMIT, self._patience.limit_s)
            self._fail(failed(late))
            effects += self.rank.leave(now) if self.rank else []
        return self._after(effects, now)

    def deadline(self) -> float | None:
        times = (self.rank.deadline() if self.rank else None, self._patience.deadline())
        return min((time for time in times if time is not None), default=None)

    @property
    def left(self) -> bool:
        """Whether this membership has been ended."""
        return self.rank is not None and self.rank.state is RankState.LEFT

    @property
    def not_ready(self) -> str:
        """Why calls would have to wait now, empty when they would not."""
        if self.failure is not None:
            return f"{self.failure.error}: {self.failure.fields}"
        if self.rank is not None and not self.rank.active:
            return self.rank.cause or "joining"
        return ""

    # --- the loop -------------------------------------------------------------------------------------------------

    def _after(self, pending: list[RankEffect], now: float) -> list[WorkerEffect]:
        """Follows up what the rank's machine said, takes the calls that can be taken, collects what is to be done."""
        self._tell(now)
        out: list[WorkerEffect] = []
        self._follow(pending, out, now)
        self._take_calls()
        self._follow(self._said_since(), out, now)
        effects, self.cache.state.effects = self.cache.state.effects, []
        for effect in effects:
            if isinstance(effect, Reply):
                self._unanswered.pop((effect.session, effect.call), None)
            elif isinstance(effect, StartCopy):
                self.copies_open += 1
            out.append(effect)
        self._patience.look(self._waits_for_copies(), self.cache.awaited, now)
        return out

    def _waits_for_copies(self) -> bool:
        """Whether calls wait for copies of this rank, and for nothing else."""
        if not self.copies_open or not (self._queue or self._unanswered) or self.failure is not None:
            return False
        return self._renewing or self.left or self.cache.parked

    def _said_since(self) -> list[RankEffect]:
        """What the rank's machine wants sent because of calls and copies."""
        said = self._said
        self._said = []
        if isinstance(self.consensus, AgreedConsensus):
            said, self.consensus.effects = self.consensus.effects + said, []
        return said

    def _tell(self, now: float) -> None:
        self._now = now
        if isinstance(self.consensus, AgreedConsensus):
            self.consensus.now = now

    def _follow(self, effects: list[RankEffect], out: list[WorkerEffect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, SendUp | Attach | Note):
                out.append(effect)
            elif isinstance(effect, Apply):
                self._apply(effect.entry)
            elif isinstance(effect, Activated):
                self._activated(effect)
            elif isinstance(effect, GroupSuspended):
                self.suspended = self._last_cause = effect.cause
                out.append(Note("suspended", "", {"rank": effect.rank, "cause": effect.cause, "group": self.group}))
            elif isinstance(effect, JoinFailed):
                assert self.rank is not None
                self._fail(failed(refusal(self.group, self.rank.identity.rank, effect)))
            elif isinstance(effect, Lost):
                self._fail(failed(GroupLost(self.group, effect.cause, effect.waited_s)))
            elif isinstance(effect, LogWanted):
                assert self.rank is not None
                self._follow(self.rank.log(effect.round, self.cache.state.digest.log()[-LOG_EVENTS_MAX:]), out, now)
            elif isinstance(effect, DivergenceSeen):
                self._follow(self._diverged(effect, now), out, now)

    def _take_calls(self) -> None:
        if self.failure is not None:
            waiting = dict.fromkeys([*self._unanswered, *((session, number) for session, number, _ in self._queue)])
            self._queue.clear()
            for who in waiting:
                self.cache.state.reply(who, self.failure)
            return
        if self.left:
            return
        if self._renewing:
            if self.copies_open:
                return
            self._renew()
        while self._queue and self.cache.state.waiting_for is None:
            session, number, call = self._queue[0]
            self._unanswered[session, number] = None
            try:
                if not self._take(call, (session, number)):
                    return
            except UsageError as error:
                self.cache.state.reply((session, number), failed(error))
            self._queue.popleft()

    def _take(self, call: Call, who: tuple[int, int]) -> bool:
        """One call. False: it has to wait, and is tried again after the next event."""
        cache = self.cache
        ready = self._begun and self.host.ready(cache.state)
        if isinstance(call, Match) and (ready or not self.host.uncertain):
            cache.match(page_keys(call.keys, self._pages_max), who)
            return True
        if not ready:
            return False
        if isinstance(call, Agree):
            self._agreements.propose(call, who, self.cache.state, self.consensus)
            return True
        if isinstance(cache, StreamingCache):
            serve_streaming(cache, call, who, self._pages_max)
            return True
        if isinstance(call, Advance):
            return self._advance(cache, call.step, who)
        serve(cache, call, who, self._pages_max)
        return True

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _advance(self, cache: Cache, step: int, who: tuple[int, int]) -> bool:
        """Applies the verdict that is due and sends this step's frame. False: the verdict has not come."""
        completed = [completion for completion in self.consensus.ended() if self.cache.complete(completion)]
        due = None
        if self.rank is not None:
            self.rank.rounds.check_follows(step)
            due = self.rank.rounds.due(step)
            verdict = None if due is None else self.rank.rounds.verdict(due)
            if due is not None and verdict is None:
                return False
            if verdict is not None:
                completed += self._apply_verdict(verdict)
            self._send_frame(self.rank, step)
        self.step = step
        cache.state.reply(who, advanced(cache, step, -1 if due is None else due, completed))
        return True

    def _apply_verdict(self, verdict: Verdict) -> list[Completion]:
        """A round takes effect: completions first, since they free what decisions may need."""
        consensus = self.consensus
        if not isinstance(consensus, AgreedConsensus):
            return []
        completed = [completion for completion in verdict.completions if self.cache.complete(completion)]
        consensus.ledger.settle(verdict.round, verdict.capacity)
        for decision in verdict.decisions:
            self._decide(decision, Path.VOTED)
        return completed

    def _send_frame(self, rank: RankMachine, step: int) -> None:
        state, consensus = self.cache.state, self.consensus
        digest = state.digest.combined(state.tree.digest)
        if isinstance(consensus, AgreedConsensus):
            consensus.ledger.mark(step)
        self._said += rank.frame(step, state.pools.free_counts(), digest, self._now)

    # --- decisions ------------------------------------------------------------------------------------------------

    def _apply(self, entry: Decision | Completion) -> None:
        """The next entry of the stream. While the cache of its history is not made yet it waits for that."""
        if self._renewing:
            self._early.append(entry)
        elif isinstance(entry, Decision):
            self._decide(entry, Path.IMMEDIATE)
        else:
            self.cache.complete(entry)

    def _decide(self, decision: Decision, path: Path) -> None:
        state = self.cache.state
        if self._agreements.decide(decision, path, state) or self.host.decide(decision, state, self.consensus):
            return
        self.cache.decide(decision)

    # --- the group ------------------------------------------------------------------------------------------------

    def _activated(self, effect: Activated) -> None:
        self.suspended = ""
        if effect.fresh:
            self._renewing = True
            self._early.clear()
            self._activation = effect.activate

    def _renew(self) -> None:
        """A new history begins, once no copy of the old one touches its pages: empty, but for what is to be kept."""
        assert self._activation is not None
        kept = self.host.pages(self.cache.state)
        replies = [effect for effect in self.cache.state.effects if isinstance(effect, Reply)]
        answered = {(reply.session, reply.call) for reply in replies}
        waiting = [(session, number) for session, number, _ in self._queue]
        self.cache.abandon()
        self.cache, self.consensus = self._make_cache()
        self.host.inherit(kept, self.cache.state)
        self.cache.state.effects += replies
        if self._begun:
            self.renewals += 1
            self._renewed = Failed("GroupRenewed", [self.group, self._last_cause])
            self._queue.clear()
            for who in [who for who in dict.fromkeys([*self._unanswered, *waiting]) if who not in answered]:
                self.cache.state.reply(who, self._renewed)
        if isinstance(self.consensus, AgreedConsensus):
            self.consensus.ledger.begin(self._activation.capacity)
            self.consensus.now = self._now
        self._agreements.begin()
        self._renewing = False
        self._begun = True
        self.step = -1
        self.host.begin(self._activation, self.cache.state, self.consensus)
        early, self._early = self._early, []
        for entry in early:
            self._apply(entry)

    def _diverged(self, seen: DivergenceSeen, now: float) -> list[RankEffect]:
        self.divergences += 1
        self.first_divergence = self.first_divergence or seen
        effects: list[RankEffect] = [noted(self.group, seen)]
        if self._policy is DivergencePolicy.WARN:
            return effects
        self.host.void()
        if self._policy is DivergencePolicy.STOP or self.rank is None:
            self._fail(Failed("Diverged", [self.group, seen.round, seen.sides, seen.operation]))
            return effects
        return effects + self.rank.begin_anew(Reason.DIVERGED, seen.sides[-1][0], difference(seen), now)

    def _fail(self, failure: Failed) -> None:
        self.failure = self.failure or failure
