"""A stream whose requests wait for what storage holds of them, and are cancelled at times, as in SGLang's scheduler."""

import random
import time
from array import array
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from tests.sglang.engine import Engine
from tests.sglang.stored import fail_at_times, rest
from tests.sglang.stream import Faults, Stream, tokens_of

WAITING_MAX = 4
FORWARD_S = 0.001
"""What a step takes beside the cache: the time in which storage threads get on."""


@dataclass(frozen=True)
class Waiting:
    """A request that is not admitted yet."""

    handle: Any
    tokens: list[int]


class StorageStream(Stream):
    """Without a storage backend it plays the same requests, which then never wait."""

    def __init__(self, engine: Engine, seed: int, rank: int, faults: Faults) -> None:
        super().__init__(engine, seed, rank, faults)
        self._seed, self._rank = seed, rank
        self._waiting: list[Waiting] = []
        self._arrived = 0
        self.fetched = 0
        """Tokens that came from storage for requests that were admitted."""

    def fail_at_times(self) -> None:
        """From now on this rank's store loses pages and does not answer, as it likes."""
        fail_at_times(self.engine, random.Random(f"store {self._seed} {self._rank}"))

    def _requests(self, rng: random.Random) -> tuple[Any, ...]:
        if len(self._waiting) < WAITING_MAX:
            self._arrive(tokens_of(rng))
        told: list[Any] = []
        if self._waiting:
            time.sleep(FORWARD_S)
        for request in list(self._waiting):
            if rng.random() < 0.1:
                self._cancel(request)
                told.append("cancelled")
            elif self.engine.cache.check_prefetch_progress(request.handle):
                self._waiting.remove(request)
                fetched, _ = self.engine.cache.pop_prefetch_loaded_span(request.handle)
                self.fetched += fetched
                told += fetched, *self._serve(request.tokens, check_bytes=rng.random() < 0.5)
        return tuple(told)

    def _arrive(self, tokens: list[int]) -> None:
        cache = self.engine.cache
        request = Waiting(CacheRequestHandle(f"request {self._arrived}", 0), tokens)
        self._arrived += 1
        self._waiting.append(request)
        match = self.engine.match(tokens)
        anchor = match.last_host_node
        matched = match.device_prefix_len + match.host_hit_length
        if cache.is_backuped(anchor) or cache.is_root(anchor):
            cache.prefetch_from_storage(
                request.handle,
                anchor,
                array("q", tokens[matched:]),
                cache.get_last_hash_value(anchor),
                matched_prefix_tokens=tokens[:matched],
            )

    def _cancel(self, request: Waiting) -> None:
        self._waiting.remove(request)
        self.engine.cache.release_aborted_request(request.handle)

    def finish(self, *, at_rest: bool = True) -> None:
        """`at_rest`: waits also until storage threads work for no cancelled request any more."""
        for request in list(self._waiting):
            self._cancel(request)
        super().finish()
        if at_rest and self.engine.cache.enable_storage:
            rest(self.engine)
