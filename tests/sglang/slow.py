"""Copies that take some steps, by the choice of one rank: the bytes move when the copy is over, not when it begins."""

from collections.abc import Callable
from typing import Any

from tests.sglang.engine import Engine


class _LateEvent:
    """The end of a copy. Asked before its step, it is not over; waited for, it is, and all copies before it."""

    def __init__(self, copies: "SlowCopies", due: int, move: Callable[[], Any], before: "_LateEvent | None") -> None:
        self._copies, self._due, self._move, self._before = copies, due, move, before
        self._over = False

    def query(self) -> bool:
        if not self._over and self._copies.now >= self._due:
            self.synchronize()
        return self._over

    def synchronize(self) -> None:
        if self._over:
            return
        if self._before is not None:
            self._before.synchronize()
        self._over = True
        self._before = None
        self._move()

    def wait(self, *_: object) -> None:
        self.synchronize()


class SlowCopies:
    """Stands between SGLang's controller and its transfer engine. `delay` says how many steps the next copy takes."""

    def __init__(self, engine: Engine, delay: Callable[[], int]) -> None:
        self.now = 0
        self._inner = engine.controller.l2_transfer_engine
        self._delay = delay
        self._last: dict[str, _LateEvent | None] = {"out": None, "in": None}
        engine.controller.l2_transfer_engine = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def tick(self) -> None:
        """A step has passed."""
        self.now += 1

    def submit_device_to_host(self, transfers: list[Any]) -> Any:
        return self._submit("out", lambda: self._inner.submit_device_to_host(transfers))

    def submit_host_to_device(self, transfers: list[Any], **options: Any) -> Any:
        layers = {"transfer_layer_id_max": options["transfer_layer_id_max"]}
        completion = self._submit("in", lambda: self._inner.submit_host_to_device(transfers, **layers))
        for layer in range(options["transfer_layer_id_max"]):
            options["on_layer_done"](layer)
        return completion

    def _submit(self, direction: str, move: Callable[[], Any]) -> Any:
        before = self._last[direction]
        due = self.now + self._delay()
        if before is not None:
            due = max(due, before._due)
        event = self._last[direction] = _LateEvent(self, due, move, before)
        nothing = self._inner._start_event(None)
        return type_of_completion(nothing, event, False)


def type_of_completion(start: Any, finish: Any, timing: bool) -> Any:
    from sglang.srt.mem_cache.l2_transfer import TransferCompletion

    return TransferCompletion(start, finish, timing)
