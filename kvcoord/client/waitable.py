"""What the blocking client returns and one can wait for: leases and load-backs.

Every wait ends after the client's `call_timeout_s` with DeadlineExceeded. Whoever waits also sends what is queued.
"""

from typing import Protocol, Self

from kvcoord.client.blocking_channel import BlockingChannel
from kvcoord.client.progress import Landing, PendingOutcome, missing
from kvcoord.client.results import GrantedLease, Holder, Loading, StartedLoad, layers_needed
from kvcoord.errors import PeerUnavailable
from kvcoord.protocol.local import Acquired, Loaded


class LeaseHolder(Holder, Protocol):
    """What a lease asks of its client."""

    def release(self, lease: "BlockingLease") -> None: ...

    def write_lease(self, lease: "BlockingLease", *, deferred: bool = True) -> PendingOutcome: ...


class BlockingLease(GrantedLease):
    """A path held on the device until it is released: `with lease` does that. False when aborted."""

    __slots__ = ("_channel", "_client")

    def __init__(
        self,
        answer: Acquired,
        landings: tuple[Landing, ...],
        client: LeaseHolder,
        asked: int,
        channel: BlockingChannel,
    ) -> None:
        super().__init__(answer, landings, client, asked)
        self._client = client
        self._channel = channel

    def layer(self, index: int) -> None:
        """Block until layer `index` of every loaded page is on the device.

        Raises TransferFailed when the copy failed before it, LoadRetracted once an `advance` has told that it failed on
        some rank (what was computed from these pages is void, here too: release and acquire again), UsageError when
        there is no such layer or lease.
        """
        wait_landed(self, index, self._channel)

    def landed(self) -> None:
        """As `layer`, for all layers."""
        wait_landed(self, None, self._channel)

    def write_through(self, *, deferred: bool = True) -> PendingOutcome:
        """Publish the pages that the engine had to compute, and copy them to the host. Once, before `release`.

        The outcome is known at once or with a later `advance`; see `BlockingCacheClient.write_lease`.
        """
        return self._client.write_lease(self, deferred=deferred)

    def release(self) -> None:
        """The engine no longer reads these pages. Does nothing for a lease that is not `held`."""
        self._client.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self.release()
        except PeerUnavailable:
            if error is None:
                raise


class BlockingLoad(StartedLoad):
    """A load-back under way: `wait` for all of it, `layer` for one layer."""

    __slots__ = ("_channel",)

    def __init__(self, answer: Loaded, landings: tuple[Landing, ...], channel: BlockingChannel) -> None:
        super().__init__(answer, landings)
        self._channel = channel

    def layer(self, index: int) -> None:
        """Block until layer `index` of every page is on the device.

        Raises TransferFailed when the copy failed before it, LoadRetracted once an `advance` has told that it failed on
        some rank, UsageError when there is no such layer or it was aborted.
        """
        wait_landed(self, index, self._channel)

    def wait(self) -> None:
        """As `layer`, for all layers."""
        wait_landed(self, None, self._channel)


def wait_landed(loading: Loading, layer: int | None, channel: BlockingChannel) -> None:
    """Block until `layer` of all pages is there, None for all layers."""
    layers = layers_needed(loading, layer)
    if missing(loading.landings, layers) is None:
        return
    channel.flush()
    channel.read_until(lambda: missing(loading.landings, layers) is None, lambda: f"copy of {loading.operation}")
    missing(loading.landings, layers)
