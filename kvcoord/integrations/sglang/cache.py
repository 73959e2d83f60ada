"""SGLang's UnifiedRadixCache with every rank-local decision replaced by one that the group has agreed on.

A subclass: the tree, the pools, the copies and the bookkeeping stay SGLang's own code. Overridden is where the original
looks at this rank's free list, finished copies, storage or clock, and where it reduces something over the ranks. What
is overridden, and what is used besides, is listed in `contract` and checked when the engine starts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, cast

from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvcoord.domain import OperationKind, Reason
from kvcoord.errors import InvariantBroken, TransferFailed
from kvcoord.integrations.sglang import allocations
from kvcoord.integrations.sglang.agreement import Agreement, join
from kvcoord.integrations.sglang.allocations import broken_promise
from kvcoord.integrations.sglang.attachment import Told
from kvcoord.integrations.sglang.capacity import KV, Needs
from kvcoord.integrations.sglang.components import COMPONENTS, STATE
from kvcoord.integrations.sglang.storage import peek
from kvcoord.integrations.sglang.support import NO_STORAGE, refuse_unsupported
from kvcoord.protocol.messages import Completion, Verdict


class KvcoordRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """Built by SGLang through `plugin.build`. Joins its group at the end of `init_hicache`.

    `check_hicache_events` raises GroupLost, Diverged or JoinRefused, on every rank, when the group cannot go on.
    """

    agreement: Agreement | None = None

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """SGLang's own set-up, then the group. Raises UsageError for a configuration that is not supported."""
        super().init_hicache(server_args, params)
        refuse_unsupported(self, server_args)
        self.agreement = join(self, server_args, params)
        self._watch_allocations()

    def _watch_allocations(self) -> None:
        """Shows SGLang the agreed free count, and lets no allocation that the group counts on fail in silence."""
        agreed = self._agreed
        allocations.watch(self, agreed.pools, agreed.capacity)
        self.cache_controller.allocate_storage_hit = self._allocate_storage_hit
        self._limit_prefetch()

    @property
    def _agreed(self) -> Agreement:
        if self.agreement is None:
            raise InvariantBroken("a cache with a host tier has joined its group", "used before init_hicache")
        return self.agreement

    # --- the step -------------------------------------------------------------------------------------------------

    def check_hicache_events(self) -> None:
        """Once a scheduler step: applies the verdict that is due and sends this step's frame.

        Most steps have nothing to say but their free counts, and each call costs a cold cache: nothing is asked of a
        part that cannot have anything.
        """
        agreed = self.agreement or self._agreed
        rounds, controller = agreed.rounds, self.cache_controller
        verdict = rounds.verdict()
        if verdict is not None:
            agreed.capacity.settle(verdict)
            if verdict.decisions or verdict.completions:
                self._apply(verdict)
        if controller.write_queue:
            self.flush_pending_backups()
        if controller.enable_storage:  # The cache's own flag is asked of its tree.
            self._take_from_storage()
        agreed.outgoing.report(controller.ack_write_queue)
        agreed.incoming.report(controller.ack_load_queue)
        free = agreed.capacity.count(rounds.step)
        if agreed.writes.intended:
            agreed.writes.reserve()
        rounds.send(free, agreed.pools.tree_digest())
        if self.enable_storage_metrics and self.storage_metrics_collector is not None:
            self._log_storage_metrics()

    def _apply(self, verdict: Verdict) -> None:
        """What the ranks have decided, and which operations have ended on all of them."""
        agreed = self._agreed
        for decision in verdict.decisions:
            agreed.rounds.voted(decision)
            agreed.writes.decided(decision)
        for completion in verdict.completions:
            self._completed(completion)
        finished = agreed.outgoing.finished(self.cache_controller.ack_write_queue)
        if finished:
            super().writing_check(finish_count=finished)
        finished = agreed.incoming.finished(self.cache_controller.ack_load_queue)
        if finished:
            super().loading_check(finish_count=finished)

    def _completed(self, completion: Completion) -> None:
        """One operation has ended on all ranks. One that is only late is waited for: its pages are still in use."""
        if not completion.drained:
            return
        if completion.reason is Reason.COPY_FAILED:
            raise TransferFailed(completion.operation, -1, f"the copy failed on rank {completion.rank}")
        agreed, operation = self._agreed, completion.operation
        agreed.rounds.event(f"done {operation}")
        if not agreed.outgoing.completed(operation) and not agreed.incoming.completed(operation):
            agreed.storage.completed(operation)

    # --- writes to the host ---------------------------------------------------------------------------------------

    def _execute_and_commit_kv_backup(self, action: Any, write_back: bool = False) -> int:
        """Write-through: an intent, decided by a later verdict. Write-back: now, on the agreed capacity."""
        if not write_back:
            self._agreed.writes.intend(action.node_ids)
            return 0
        written = 0
        for node_id in action.node_ids:
            needs = self._agreed.pools.needs([node_id])
            if not needs:
                continue
            if not self._covers(OperationKind.WRITE_BACK, needs):
                return 0
            written = self.write_in_given_slots(node_id, needs, write_back=True)
        return written

    def write_in_given_slots(self, node_id: int, needs: Needs, *, write_back: bool = False) -> int:
        """SGLang's own reserve and commit of one node, in slots that every rank has for it. Returns the KV's."""
        written: int = super()._execute_and_commit_kv_backup(BackupKV([node_id]), write_back=write_back)
        if node_id not in self.ongoing_write_through:
            broken_promise(f"write of {needs}", sum(needs.values()))
        return written

    def _covers(self, what: str, needs: Needs) -> bool:
        """Takes these host slots on every rank, now, or on none."""
        agreed = self._agreed
        if not self.make_host_room(needs):
            agreed.rounds.counters.covered(what, Reason.HOST_FULL)
            return False
        agreed.capacity.take_host(needs)
        agreed.rounds.counters.covered(what)
        return True

    def make_host_room(self, needs: Needs) -> bool:
        """Evicts, the same nodes on every rank, until these slots are free on all. False: that cannot be had."""
        capacity = self._agreed.capacity
        for pool in needs:
            short = capacity.host_short(needs).get(pool, 0)
            if short:
                self.free_host(pool, short)
        return not capacity.host_short(needs)

    def free_host(self, pool: str, slots: int) -> int:
        """Evicts, the same nodes on every rank, so many slots of a host pool. Returns how many it became."""
        return self.evict_host(slots) if pool == KV else self._evict_host_part(slots, COMPONENTS[pool])

    def evict_host(self, num_tokens: int, component_type: Any = BASE_COMPONENT_TYPE) -> int:
        """Called at the same point with the same number on every rank, so the same nodes go.

        SGLang asks for room beside the KV's where this rank's own pool lacks it, inside a reservation: not any more,
        `make_host_room` has been there before.
        """
        return self._evict_host_part(num_tokens, component_type) if component_type is BASE_COMPONENT_TYPE else 0

    def _evict_host_part(self, slots: int, part: Any) -> int:
        result = self.tree_core.drive_host_eviction(part, slots)
        evicted = int(result.tracker.get(part, 0))
        freed = self._agreed.pools.freed(result)
        self._apply_eviction_result(result)
        if freed:
            self._agreed.capacity.return_host(freed)
            self._agreed.rounds.event(f"evict-host {slots} {freed}")
        return evicted

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        """Copies end with a verdict. Only write-back waits for this rank's own, at the same point on every rank."""
        if write_back and self.is_write_back:
            super().writing_check(write_back=True)

    def backup_kv_cache(self, req: Any) -> Any:
        """Retraction: a copy of the request's KV on the host of every rank, or (None) of none."""
        device_slots, transfers = self._retraction_device_transfers(req)
        needs = {KV: len(device_slots)}
        needs.update(
            (part.name.value, len(part.device_indices)) for part in transfers if part.indices_from_pool is None
        )
        if not self._covers("retraction", needs):
            return None
        backup = super().backup_kv_cache(req)
        if backup is None:
            broken_promise(f"retraction of {needs}", sum(needs.values()))
        return backup

    # --- load-back and eviction -----------------------------------------------------------------------------------

    def load_back(self, node_id: int, mem_quota: int | None = None, req: Any = None) -> bool:
        """Decided at once, on device slots that every rank has."""
        rounds, capacity = self._agreed.rounds, self._agreed.capacity
        loaded = STATE not in self._agreed.pools.names or allocations.has_state_for(self, capacity, node_id, req)
        loaded = loaded and super().load_back(node_id, mem_quota, req)
        if loaded:
            operation = rounds.name(OperationKind.LOAD_BACK)
            self._agreed.incoming.begin(operation, [node_id])
            rounds.event(operation)
            rounds.counters.covered(OperationKind.LOAD_BACK)
        else:
            rounds.event(f"no load-back {node_id}")
            rounds.counters.covered(OperationKind.LOAD_BACK, Reason.REFUSED)
        return loaded

    def loading_check(self, finish_count: int | None = None) -> None:
        """Loads end with a verdict."""

    def _evict(self, params: Any, *args: Any, **options: Any) -> Any:
        result = super()._evict(params, *args, **options)
        evicted = result.num_tokens_evicted, result.swa_num_tokens_evicted, result.mamba_num_evicted
        if self.agreement is not None and any(evicted):
            self.agreement.rounds.event(f"evict {' '.join(map(str, evicted))}")
        return result

    def insert(self, params: Any) -> Any:
        result = super().insert(params)
        if self.agreement is not None:
            self.agreement.rounds.event(f"insert {len(params.key)} {result.prefix_len}")
        return result

    # --- storage --------------------------------------------------------------------------------------------------

    def _take_from_storage(self) -> None:
        """Takes what every rank has: the same hits, landed pages and backups, and pages that nothing uses any more."""
        storage, controller = self._agreed.storage, self.cache_controller
        storage.report()
        hits, landed, backups = storage.take()
        given_back = controller.host_mem_release_queue, *controller.extra_host_mem_release_queues.values()
        if hits or landed or backups or any(queue.queue for queue in given_back):
            self._take(hits, landed, backups)

    def take_all_from_storage(self) -> None:
        """Takes what has landed, when that is the same on every rank, and every backup that has ended."""
        controller = self.cache_controller
        self._take(0, controller.ack_prefetch_queue.qsize(), controller.ack_backup_queue.qsize())

    def _take(self, hits: int, landed: int, backups: int) -> None:
        controller = self.cache_controller
        queried = peek(controller.prefetch_hit_queue)[:hits] if hits else []
        fetched = peek(controller.ack_prefetch_queue)[:landed] if landed else []
        self._drain_storage_control_queues_impl(
            n_storage_hit=hits,
            n_ack_prefetch=landed,
            n_backup=backups,
            n_release=None,
            extra_release_counts=dict.fromkeys(controller.extra_host_mem_release_queues),
            log_metrics=True,
        )
        self._agreed.storage.sweep(queried, fetched)

    def drain_storage_control_queues(self) -> None:
        """Done by each step's verdict."""

    def prefetch_from_storage(self, request: Any, *arguments: Any, **options: Any) -> Any:
        """As SGLang does; what its threads are given to do is watched."""
        known = request in self.ongoing_prefetch
        told = super().prefetch_from_storage(request, *arguments, **options)
        info = self.ongoing_prefetch.get(request)
        if info is not None and not known:
            self._agreed.storage.begin(info.operation)
        return told

    def _allocate_storage_hit(
        self, operation: Any, hit_tokens: int, *, allow_partial: bool, min_tokens: int, evict_host: Callable[[int], int]
    ) -> tuple[Any, int]:
        """Host slots for what storage has: as many as every rank can give."""
        self.make_host_room({KV: hit_tokens})
        capacity = self._agreed.capacity
        available = capacity.host_available()
        slots = min(hit_tokens, available - available % self.page_size)
        rounds = self._agreed.rounds
        rounds.event(f"storage-hit {hit_tokens} {slots}")
        if slots < hit_tokens and (not allow_partial or slots < min_tokens):
            rounds.counters.covered("storage-prefetch", Reason.HOST_FULL)
            return None, slots
        capacity.take_host({KV: slots})
        rounds.counters.covered("storage-prefetch")
        host_slots = self.cache_controller.alloc_prefetch_host_buffers(operation, slots)
        if host_slots is None:
            broken_promise("storage prefetch", slots)
        return host_slots, slots

    def _can_terminate_prefetch(self, operation: Any) -> bool:
        if self.prefetch_stop_policy == "timeout":
            return self._agreed.storage.expired(operation)
        return bool(super()._can_terminate_prefetch(operation))

    def _handle_prefetch_result(self, operation: Any) -> None:
        super()._handle_prefetch_result(operation)
        self._agreed.storage.forget(operation)

    def _retire_ongoing_prefetch(self, request: Any, host_indices: Any, extra_pools: Any) -> None:
        operation = self.ongoing_prefetch[request].operation
        super()._retire_ongoing_prefetch(request, host_indices, extra_pools)
        self._agreed.storage.forget(operation)

    def _limit_prefetch(self) -> None:
        """SGLang limits what is fetched at once by the size of this rank's host pool: here by the smallest of all."""
        if self.enable_storage:
            controller = self.cache_controller
            controller.prefetch_capacity_limit = min(
                controller.prefetch_capacity_limit, self._agreed.capacity.host_slots // 2
            )

    def attach_storage_backend(self, storage_backend: str, *arguments: Any, **options: Any) -> tuple[bool, str]:
        """As SGLang does, on every rank or on none, but for a change of the write policy: writes of the old one may
        still be voted on."""
        policy = arguments[3] if len(arguments) > 3 else options.get("hicache_write_policy")
        if policy not in (None, self.cache_controller.write_policy):
            return False, f"kvcoord cannot change hicache_write_policy to {policy} at run time: restart with that flag"
        if self._agreed.pools.is_hybrid:
            return False, NO_STORAGE
        attach = partial(super().attach_storage_backend, storage_backend, *arguments, **options)
        if self.enable_storage:
            return cast(Told, attach())
        done, said = self._agreed.attachment.attach(attach)
        self._limit_prefetch()
        return done, said

    def detach_storage_backend(self) -> tuple[bool, str]:
        """As SGLang does, on every rank or on none. What storage brought for aborted requests is given back."""
        if not self.enable_storage:
            return cast(Told, super().detach_storage_backend())
        return self._agreed.attachment.detach(super().detach_storage_backend)

    def _log_storage_metrics(self) -> None:
        statistics = self.cache_controller.storage_backend.get_stats()
        if statistics is not None:
            if not hasattr(statistics, "prefetch_stats"):
                statistics.prefetch_stats = self.prefetch_outcome_stats_snapshot()
            self.storage_metrics_collector.log_storage_metrics(statistics)

    # --- life -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Called on every rank at the same point; what was open is answered and forgotten."""
        agreed = self.agreement
        if agreed is not None:
            agreed.attachment.settle()
            agreed.storage.answer()
        super().reset()
        if agreed is not None:
            agreed.reset()

    def shutdown(self) -> None:
        """Detaches storage as SGLang does, and leaves the group. Harmless when repeated."""
        super().shutdown()
        if self.agreement is not None:
            self.agreement.close()

    # --- what must not be used any more ---------------------------------------------------------------------------

    def _all_reduce_attn_groups(self, tensor: Any, op: Any) -> NoReturn:
        raise InvariantBroken("the scheduler thread uses no collective", "_all_reduce_attn_groups was called")

    def _pp_sync(self, data: Any) -> NoReturn:
        raise InvariantBroken("the scheduler thread uses no collective", "_pp_sync was called")
