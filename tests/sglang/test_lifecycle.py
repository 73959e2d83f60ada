"""Storage attached and detached while the engine runs, the cache reset, the engine shut down: alike on every rank."""

import tempfile
import threading
from typing import Any

import pytest

from tests.sglang.engine import Engine, Groups
from tests.sglang.storage_stream import StorageStream
from tests.sglang.stored import OPTIONS, PAGE, STEPS_MAX
from tests.sglang.stream import Faults
from tests.sglang.world import run_ranks, values

STEPS = 50
FAULTS = Faults(host_noise=100, copy_steps=4, keeps_promises=True)


class Life:
    """One rank's engine, and what its operator does to it between requests."""

    def __init__(self, groups: Groups, folder: str, **options: Any) -> None:
        self.rank = groups.rank
        self._options = f'{{"file_storage_path": "{folder}", {OPTIONS[1:]}'
        self._threads = set(threading.enumerate())
        self.engine = Engine(groups, page_size=PAGE, host_slots=448 - 32 * groups.rank, **options)
        self.cache = self.engine.cache
        self.stream = StorageStream(self.engine, 5, groups.rank, FAULTS)

    def attach(self, policy: str = "wait_complete") -> tuple[bool, str]:
        told: tuple[bool, str] = self.cache.attach_storage_backend("file", self._options, "model", policy)
        return told

    def detach(self) -> tuple[bool, str]:
        told: tuple[bool, str] = self.cache.detach_storage_backend()
        return told

    def reset(self) -> None:
        """As SGLang's scheduler flushes its cache. What else holds host slots gives them back before."""
        self.stream.be_quiet()
        self.cache.reset()
        self.engine.allocator.clear()

    def serve(self) -> None:
        """Some requests, then none: the scheduler would call itself idle."""
        self.stream.go_on(STEPS)
        self.stream.finish()

    def cancel_while_pages_come(self) -> None:
        """Requests are cancelled while a storage thread fills their pages. It is done when the cache waits for it."""
        controller, attachment = self.cache.cache_controller, self.cache.agreement.attachment
        awaited, get, settle = threading.Event(), controller.page_get_func, attachment.settle
        controller.page_get_func = lambda *asked: awaited.wait() and get(*asked)

        def settle_after_all() -> Any:
            awaited.set()
            return settle()

        attachment.settle = settle_after_all
        for _ in range(STEPS_MAX):
            self.stream.go_on(1)
            if any(info.host_indices is not None for info in self.cache.ongoing_prefetch.values()):
                break
        else:
            raise AssertionError("storage holds nothing")
        self.stream.finish(at_rest=False)

    def left(self) -> tuple[list[str], list[str]]:
        """What is left of the stream, and the threads that are left of the engine once it is shut down, twice."""
        self.stream.play(0)
        self.engine.close()
        self.engine.close()
        return self.stream.report.leaks, sorted(
            {thread.name for thread in threading.enumerate()} - {t.name for t in self._threads}
        )


def live(scenario: Any, *, tp: int = 2, **options: Any) -> list[Any]:
    """What each rank's life came to: what the scenario tells, every step of the stream, leaks and threads."""
    with tempfile.TemporaryDirectory() as folder:

        def on_rank(groups: Groups) -> Any:
            life = Life(groups, folder, **options)
            told = scenario(life)
            return told, life.stream.report.steps, life.left()

        return values(run_ranks(on_rank, tp=tp))


def check(lives: list[Any]) -> Any:
    """All ranks lived alike and left nothing. Returns what they told."""
    for told, steps, left in lives:
        assert told == lives[0][0]
        assert steps == lives[0][1]
        assert left == ([], [])
    return lives[0][0]


def test_storage_is_attached_and_detached_twice_between_streams() -> None:
    def scenario(life: Life) -> Any:
        life.serve()
        told = []
        for _ in range(2):
            told.append(life.attach()[0])
            life.serve()
            told.append(life.detach()[0])
            life.serve()
        return told, life.stream.fetched > 0

    assert check(live(scenario)) == ([True] * 4, True)


@pytest.mark.parametrize("after", ["detach", "reset"])
def test_pages_that_arrive_for_cancelled_requests_are_given_back(after: str) -> None:
    def scenario(life: Life) -> Any:
        life.attach()
        life.serve()
        life.reset()
        for _ in range(2):
            life.cancel_while_pages_come()
            if after == "detach":
                assert life.detach()[0]
                assert life.attach()[0]
            else:
                life.reset()
        life.serve()

    check(live(scenario))


def test_a_reset_between_streams_empties_the_cache_and_the_next_stream_works() -> None:
    def scenario(life: Life) -> Any:
        for _ in range(2):
            life.serve()
            life.reset()
        empty = life.engine.device_free(), life.cache.evictable_size(), life.cache.protected_size()
        life.serve()
        return empty

    assert check(live(scenario)) == (256, 0, 0)


def unreachable(*_: object) -> None:
    raise OSError("the store is not reachable")


def test_storage_that_one_rank_cannot_attach_is_attached_by_none_and_named() -> None:
    def scenario(life: Life) -> Any:
        controller = life.cache.cache_controller
        if life.rank == 1:
            controller._generate_storage_config = unreachable
        refused = life.attach()
        vars(controller).pop("_generate_storage_config", None)
        life.serve()
        attached = life.attach()[0]
        life.serve()
        return refused, attached

    lives = live(scenario)
    refused = [told[0] for told, _, _ in lives]
    assert [done for done, _ in refused] == [False, False]
    assert "refused on rank 1" in refused[0][1]
    assert "the store is not reachable" in refused[1][1]
    assert all(told[1] for told, _, _ in lives)


def test_the_write_policy_cannot_be_changed_while_the_engine_runs() -> None:
    def scenario(life: Life) -> Any:
        done, said = life.cache.attach_storage_backend("file", life._options, "model", None, "write_back")
        life.serve()
        return done, "restart with that flag" in said, life.cache.enable_storage

    assert check(live(scenario)) == (False, True, False)


def test_the_prefetch_policy_is_changed_on_every_rank() -> None:
    def scenario(life: Life) -> Any:
        life.attach("timeout")
        life.serve()
        told = life.attach("best_effort")[0], life.cache.prefetch_stop_policy
        life.serve()
        return told

    assert check(live(scenario)) == (True, "best_effort")


def test_a_policy_that_does_not_exist_is_refused_and_a_detach_before_any_attach_is_harmless() -> None:
    def scenario(life: Life) -> Any:
        detached = life.detach()[0]
        refused, said = life.attach("no such policy")
        life.serve()
        return detached, refused, "Invalid hicache_storage_prefetch_policy" in said, life.cache.enable_storage

    assert check(live(scenario)) == (True, False, True, False)


def test_another_backend_is_refused_while_one_is_attached_and_a_second_detach_is_harmless() -> None:
    def scenario(life: Life) -> Any:
        life.attach()
        other, said = life.cache.attach_storage_backend("mooncake")
        life.serve()
        return other, "Detach first" in said, life.detach()[0], life.detach()[0]

    assert check(live(scenario)) == (False, True, True, True)


def test_a_cleared_store_brings_nothing_and_the_trees_stay_equal() -> None:
    def scenario(life: Life) -> Any:
        life.attach()
        life.serve()
        life.cache.clear_storage_backend()
        life.reset()
        life.stream.fetched = 0
        life.stream.go_on(1)
        life.stream.finish()
        return life.stream.fetched

    assert check(live(scenario)) == 0


def test_four_ranks_attach_and_detach_as_two_do() -> None:
    def scenario(life: Life) -> Any:
        life.serve()
        attached = life.attach()[0]
        life.serve()
        detached = life.detach()[0]
        life.serve()
        return attached, detached

    assert check(live(scenario, tp=4)) == (True, True)
