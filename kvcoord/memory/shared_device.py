"""An engine's pages on a GPU, shared with its sidecar, and the events that order the engine's streams with its copies.

The engine names its tensors and one event of its own; the sidecar answers with its events. From then on three calls
keep the order, all of them on the GPU:

    computed(stream)          before a call that names pages which this stream has written, or has read
    wait_layer(stream, i)     after a load-back was answered, before the stream reads layer i of its pages
    wait_written(stream)      before the stream overwrites pages of a write that is not known to be over

What is known to be over (a completed operation, a landed layer) needs no wait. It does not know how handles travel.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import msgspec

from kvcoord.errors import DriverCallFailed, UsageError
from kvcoord.memory.device import DeviceHandle, DevicePages
from kvcoord.memory.driver import Driver, Event, Stream


class DeviceHandles(msgspec.Struct, frozen=True):
    """The pages of all pools and the event that the engine records, for the sidecar."""

    pools: list[DeviceHandle]
    computed: bytes


class SharedDevice:
    """The engine's side. Close it after the client. The memory stays the engine's own.

    `pages` are those of each pool that has layers on this rank, in the group's order. A `torch.cuda.Stream` is given by
    its `cuda_stream`. Raises UsageError without pools.
    """

    def __init__(self, driver: Driver, pages: Sequence[DevicePages]) -> None:
        if not pages:
            raise UsageError("pages", [], "name the pages of at least one pool")
        self.pages = list(pages)
        self._driver = driver
        self._computed: Event | None = driver.make_event(shared=True)
        self._written: Event | None = None
        self._layers: list[Event] = []

    def handles(self) -> DeviceHandles:
        """What the sidecar needs. Raises UsageError after `close`, or for memory that cannot be shared."""
        return DeviceHandles([pages.handle() for pages in self.pages], self._driver.export_event(self._own()))

    def adopt(self, written: bytes, layers: Sequence[bytes]) -> None:
        """The sidecar's events, from its answer; those of an earlier one are dropped."""
        self._drop_adopted()
        self._written = self._driver.open_event(written)
        for handle in layers:
            self._layers.append(self._driver.open_event(handle))

    def computed(self, stream: Stream) -> None:
        """What the stream was given so far comes before the copies that are asked for from now on."""
        self._driver.record(self._own(), stream)

    def wait_layer(self, stream: Stream, layer: int) -> None:
        """What the stream is given from now on comes after this layer of every load that has been started.

        Raises UsageError before `adopt`, and for a layer that there is not.
        """
        if not 0 <= layer < len(self._layers):
            raise UsageError("layer", layer, f"the sidecar has {len(self._layers)} layers: register first")
        self._driver.wait(stream, self._layers[layer])

    def wait_written(self, stream: Stream) -> None:
        """What the stream is given from now on comes after every write that has been started.

        Raises UsageError before `adopt`.
        """
        if self._written is None:
            raise UsageError("stream", stream, "the sidecar's events are not known: register first")
        self._driver.wait(stream, self._written)

    def close(self) -> None:
        """Drop the events. May be called again."""
        self._drop_adopted()
        event, self._computed = self._computed, None
        if event is not None:
            with suppress(DriverCallFailed):  # A driver that is broken has dropped everything already.
                self._driver.drop_event(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own(self) -> Event:
        if self._computed is None:
            raise UsageError("device", "closed", "register before it is closed")
        return self._computed

    def _drop_adopted(self) -> None:
        events = [*self._layers, *([] if self._written is None else [self._written])]
        self._layers, self._written = [], None
        for event in events:
            with suppress(DriverCallFailed):
                self._driver.drop_event(event)
