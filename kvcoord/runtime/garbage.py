"""Keeps Python's garbage collector from looking again and again at what a worker keeps for long.

An index of many pages is some hundred thousand objects. Every full collection looks at all of them, stops the rank, and
with it its group, for a tenth of a second for 200,000 objects, and finds nothing, since what is dropped goes by its
reference counts. So what has survived a collection of middle-aged objects is set aside, and looked at only between two
engines' lives, when nobody steps. It is a setting of the whole process, so processes choose it, not what runs in them.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def survivors_set_aside() -> Iterator[None]:
    """Full collections find next to nothing to look at meanwhile. Afterwards everything is looked at as before."""
    gc.callbacks.append(_collected)
    try:
        yield
    finally:
        gc.callbacks.remove(_collected)
        gc.unfreeze()


def collect_everything() -> None:
    """Looks at what was set aside too, once: takes half a second for a million objects."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _collected(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] > 0:
        gc.freeze()
