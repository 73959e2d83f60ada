"""A lease: one path that an engine holds on the device while a request runs."""

from kvcoord.domain import PageKey
from kvcoord.index.results import Pin
from kvcoord.index.tails import TailPin


class Lease:
    """Pages of the path `keys`, used at `tick`.

    `own` are slots, one list per pool, that it still owns for the pages from `first_new` on: those the engine computes;
    in a pool that keeps only ends, for the last of them. `pins` and `tail_pins` keep what is published of it. `loads`
    counts load-backs of its pages, its own and shared ones, that have not ended on all ranks: until then nothing
    computed from them is published, and `write_asked` and `release_asked` remember what to do then. `broken`: one of
    them was retracted.
    """

    __slots__ = (
        "broken",
        "device_pages",
        "first_new",
        "host_pages",
        "keys",
        "loads",
        "number",
        "own",
        "pins",
        "release_asked",
        "tail_pins",
        "tick",
        "write_asked",
    )

    def __init__(self, number: int, keys: list[PageKey], tick: int) -> None:
        self.number = number
        self.keys = keys
        self.tick = tick
        self.device_pages = 0
        self.host_pages = 0
        self.first_new = len(keys)
        self.own: tuple[list[int], ...] = ()
        self.pins: list[Pin] = []
        self.tail_pins: list[TailPin] = []
        self.loads = 0
        self.broken = False
        self.write_asked: int | None = None
        """Serial of the write that waits for the loads."""
        self.release_asked = False

    @property
    def owner(self) -> str:
        """As the pools know it."""
        return f"lease/{self.number}"
