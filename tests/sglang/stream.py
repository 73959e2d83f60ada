"""A stream of requests, the same on every rank, on an engine with faults of its own. Says what each step came to."""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.sglang.engine import Engine
from tests.sglang.noise import DeviceNoise, HostNoise
from tests.sglang.slow import SlowCopies

FAMILIES = 6
UNIT = 16
RUNNING_MAX = 3


@dataclass(frozen=True)
class Faults:
    """How the ranks differ. Slots and steps; 0 for none."""

    host_noise: int = 0
    device_noise: int = 0
    copy_steps: int = 0
    keeps_promises: bool = False


@dataclass
class Report:
    """`steps` has one entry for each step; equal on all ranks if and only if they took the same decisions."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    loads: int = 0
    wrong_bytes: int = 0
    leaks: list[str] = field(default_factory=list)


def tokens_of(rng: random.Random) -> list[int]:
    """One of a few families of prompts that share prefixes of different lengths."""
    family, length = rng.randrange(FAMILIES), UNIT * rng.randint(1, 6)
    fork, variant = UNIT * rng.randint(1, 6), rng.randrange(3)
    return [family * 10_000 + (0 if at < fork else (variant + 1) * 1_000) + at for at in range(length)]


class Stream:
    """Plays `steps` steps on one rank. `seed` is the same on all ranks, the faults' differs."""

    def __init__(self, engine: Engine, seed: int, rank: int, faults: Faults) -> None:
        self.engine = engine
        self.report = Report()
        self._shared = random.Random(f"requests {seed}")
        own = random.Random(f"faults {seed} {rank}")
        self._running: list[tuple[Any, Any]] = []
        keeps = faults.keeps_promises
        self._noises: list[HostNoise | DeviceNoise] = [
            *(
                HostNoise(engine, own, engine.noise(pool, faults.host_noise), pool, keeps_promises=keeps)
                for pool in engine.host_pools()
            ),
            *(
                DeviceNoise(engine, own, engine.noise(pool, faults.device_noise), pool)
                for pool in engine.device_allocators()
            ),
        ]
        self._copies = SlowCopies(engine, lambda: own.randint(0, faults.copy_steps) if faults.copy_steps else 0)

    def play(self, steps: int) -> Report:
        """Plays so many steps, and ends what is open."""
        self.go_on(steps)
        self._drain()
        return self.report

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.report.steps.append(self._step())

    def _step(self) -> tuple[Any, ...]:
        rng, cache = self._shared, self.engine.cache
        self._copies.tick()
        for noise in self._noises:
            noise.tick()
        cache.check_hicache_events()
        while self._running and (len(self._running) >= RUNNING_MAX or rng.random() < 0.3):
            node, receipt = self._running.pop(rng.randrange(len(self._running)))
            cache.dec_lock_ref(node, receipt)
        served = self._requests(rng)
        cache.flush_pending_backups()
        return (*served, *self.engine.sizes())

    def _requests(self, rng: random.Random) -> tuple[Any, ...]:
        """The requests of this step. Says what became of them."""
        return self._serve(tokens_of(rng), check_bytes=rng.random() < 0.5)

    def _serve(self, tokens: list[int], *, check_bytes: bool) -> tuple[Any, ...]:
        """One request: match, load back, compute the rest, insert. What was matched stays locked meanwhile."""
        engine, cache = self.engine, self.engine.cache
        match = engine.match(tokens)
        loaded = 0
        node = match.last_device_node
        matched = cache.inc_lock_ref(node).to_dec_params()
        if (
            max(match.host_hit_length, match.swa_host_hit_length, match.mamba_host_hit_length) > 0
            and cache.has_free_load_back_slot()
        ):
            loaded, node = engine.load_back(match)
            self.report.loads += bool(loaded)
        start = match.device_prefix_len + loaded
        lock = cache.inc_lock_ref(node).to_dec_params()
        cache.dec_lock_ref(match.last_device_node, matched)
        if check_bytes:
            for ack in cache.cache_controller.ack_load_queue:
                ack.finish_event.synchronize()
            self.report.wrong_bytes += not engine.holds(node, tokens)
        inserted = self._insert(tokens, node, start)
        cache.dec_lock_ref(node, lock)
        if inserted is not None:
            last = engine.match(tokens).last_device_node
            self._running.append((last, cache.inc_lock_ref(last).to_dec_params()))
        prefix = -1 if inserted is None else inserted.prefix_len
        return (len(tokens), match.device_prefix_len, match.host_hit_length, loaded, start, prefix)

    def _insert(self, tokens: list[int], node: int, start: int) -> Any:
        engine = self.engine
        slots = engine.allocate(len(tokens) - start)
        if slots is None:
            return None
        engine.stamp(slots, tokens[start:])
        return engine.put(tokens, node, start, slots)

    def be_quiet(self) -> None:
        """The noise gives back what it holds."""
        for noise in self._noises:
            noise.end()

    def finish(self) -> None:
        """Ends every request, and steps until the scheduler would call itself idle."""
        while self._running:
            self.engine.cache.dec_lock_ref(*self._running.pop())
        for _ in range(12):
            for _ in range(8):
                self._copies.tick()
            self.engine.step()

    def _drain(self) -> None:
        """Ends requests, noise and copies, and looks for what is left over."""
        engine, cache = self.engine, self.engine.cache
        self.be_quiet()
        self.finish()
        cache.sanity_check()
        leaks = self.report.leaks
        if cache.ongoing_write_through or cache.ongoing_load_back:
            leaks.append(f"open operations {list(cache.ongoing_write_through)} {list(cache.ongoing_load_back)}")
        if engine.locked():
            leaks.append(f"{engine.locked()} slots locked")
        engine.evict(cache.evictable_size())
        cache.evict_host(engine.host.size)
        for tier, pools in (("device", engine.device_allocators()), ("host", engine.host_pools())):
            for name, pool in pools.items():
                held = pool.size - type(pool).available_size(pool)
                if held:
                    leaks.append(f"{held} slots of {tier}.{name}")
