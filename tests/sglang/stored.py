"""An engine whose storage tier is a folder of files, and what is asked of it."""

import random
import time
from array import array
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash

from tests.sglang.engine import Engine, Groups

PAGE = 16
TOKENS = list(range(1000, 1064))
STEPS_MAX = 10_000
"""Some ten times as long as a storage thread is kept waiting on a machine that stands still for seconds."""

OPTIONS = '{"prefetch_threshold": 16, "prefetch_timeout_base": 0.05, "prefetch_timeout_per_ki_token": 0}'
"""Short prompts are fetched as well, and a wait is soon over."""

UNHURRIED = OPTIONS.replace("0.05", "60")
"""A wait lasts until all is there, also by the policy that ends it after a time."""

# SGLang compiles its hash at first use, which takes longer than a scenario may.
get_native_hash(array("q", TOKENS), None, PAGE)


class Stored:
    """An engine with a file store that holds the KV of TOKENS, and nothing of it on host or device."""

    def __init__(
        self,
        groups: Groups,
        folder: str,
        backend: str | None,
        policy: str,
        model: type[Engine] = Engine,
        options: str = OPTIONS,
    ) -> None:
        self.engine = model(
            groups,
            backend=backend,
            page_size=PAGE,
            storage="file",
            storage_options=options,
            prefetch_policy=policy,
            file_storage_path=folder,
        )
        self.cache = self.engine.cache
        self.handle = CacheRequestHandle("request", 0)
        self.engine.insert(TOKENS)
        self._settle()
        self.engine.evict(64)
        self.cache.evict_host(self.engine.host.size)

    def keys(self) -> Any:
        """The names of TOKENS' pages in the store."""
        return get_native_hash(array("q", TOKENS), None, PAGE)

    def _settle(self) -> None:
        """Steps until the write and the backup are over, which all ranks see at the same step."""
        for step in range(STEPS_MAX):
            self.engine.step()
            time.sleep(0.002)
            if step >= 20 and not self.cache.ongoing_backup and not self.cache.ongoing_write_through:
                return
        raise AssertionError("not backed up")

    def prefetch(self) -> None:
        match = self.engine.match(TOKENS)
        self.cache.prefetch_from_storage(
            self.handle, match.last_device_node, array("q", TOKENS), matched_prefix_tokens=[]
        )

    def progress(self) -> int:
        """Steps until the scheduler's poll says that the request may run."""
        for step in range(STEPS_MAX):
            self.engine.step()
            time.sleep(0.002)
            if self.cache.check_prefetch_progress(self.handle):
                return step
        return -1

    def rest(self) -> None:
        """Steps until storage works for no request any more, not even for an aborted one."""
        rest(self.engine)

    def end(self) -> dict[str, Any]:
        self.engine.step(6)
        self.cache.sanity_check()
        return {
            "hit": self.engine.match(TOKENS).host_hit_length,
            "prefetching": len(self.cache.ongoing_prefetch),
            "host_used": self.engine.host.size - self.engine.host.available_size(),
            "locked": self.cache.protected_size(),
        }


def rest(engine: Engine) -> None:
    """Steps until nothing is under way to or from storage, which all ranks see at the same step."""
    cache = engine.cache
    for _ in range(STEPS_MAX):
        engine.step()
        if not cache.ongoing_backup and not cache.ongoing_prefetch and not len(cache.agreement.storage):
            return
        time.sleep(0.002)
    raise AssertionError("storage does not come to rest")


def fail_at_times(engine: Engine, rng: random.Random) -> None:
    """The store of this rank loses a page now and then, or does not answer."""
    controller = engine.controller
    exists, get = controller.storage_backend.batch_exists, controller.page_get_func
    controller.storage_backend.batch_exists = lambda *asked: max(0, exists(*asked) - rng.choice((0, 0, 1)))

    def get_or_fail(operation: Any, hashes: Any, *rest: Any) -> Any:
        if rng.random() < 0.2:
            raise OSError("the store does not answer")
        return max(0, get(operation, hashes, *rest) - rng.choice((0, 0, 1)))

    controller.page_get_func = get_or_fail
