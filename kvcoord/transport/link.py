"""What every transport offers: a listener serves many peers, a connection has one. Knows no protocol and no socket.

Callbacks, not tasks: one wake-up of the event loop drains what has arrived and hands it over as one batch. All
callbacks run on the event loop that opened the endpoint, one at a time, and must neither block nor raise. None runs
before the opener has its endpoint, and none after `close` was called.

Promised by all transports:

- Messages of one peer arrive in the order in which they were sent, whole, at most once. What was queued when a
  connection broke, or when another peer took over its identity, may be gone, and only the layer above knows whether
  that matters.
- `send` never blocks. It answers FULL when the bounded queue is full and UNREACHABLE when there is no such peer; the
  message was then not taken.
- SENT means queued, not received.
- A message longer than the receiver's `message_bytes_max` is dropped and counted, never handed over.
- `close` delivers what is queued for at most the linger time, then drops it, and always returns.
"""

from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

import msgspec

from kvcoord.errors import ConfigError, FrameOversized, UsageError

ListenerBatch = Callable[[list[tuple[bytes, bytes]]], None]
"""Takes (peer, payload) pairs in order of arrival; never an empty list."""

PeerLost = Callable[[bytes, str], None]
"""Takes a peer and the cause, after the last batch with messages of that peer."""

ConnectionBatch = Callable[[list[bytes]], None]
"""Takes payloads in order of arrival; never an empty list."""

Connected = Callable[[], None]

Lost = Callable[[str], None]
"""Takes the cause."""

Absent = Callable[[], None]
"""An attempt to connect has failed; the next one follows by itself."""

Parted = Callable[[], None]
"""Some peer is gone that the transport cannot name: whoever is sent to next and is UNREACHABLE is the one."""


class SendResult(Enum):
    """What became of one `send`."""

    SENT = "sent"
    FULL = "full"
    UNREACHABLE = "unreachable"


SENT: Final = SendResult.SENT
FULL: Final = SendResult.FULL
UNREACHABLE: Final = SendResult.UNREACHABLE
"""For what is done with every message: looking a member up in its enum costs several times a global."""


class LinkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Every bound of one endpoint. Raises `ConfigError` for values that cannot work together.

    `queue_messages_max` bounds the messages queued for one peer (ZeroMQ, loopback), `queue_bytes_max` the bytes (Unix).
    `peers_max` bounds the connections of a Unix listener; ZeroMQ has no such limit.
    `send_timeout_s` is how long a blocking connection waits for room.
    """

    queue_messages_max: int = 1024
    queue_bytes_max: int = 8 << 20
    message_bytes_max: int = 1 << 20
    batch_messages_max: int = 256
    peers_max: int = 1024
    connect_timeout_s: float = 5.0
    send_timeout_s: float = 5.0
    linger_s: float = 1.0
    reconnect_interval_s: float = 0.02
    reconnect_interval_max_s: float = 0.5

    def __post_init__(self) -> None:
        for field in ("queue_messages_max", "message_bytes_max", "batch_messages_max", "peers_max"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "must be at least 1")
        for field in ("connect_timeout_s", "send_timeout_s", "reconnect_interval_s"):
            if getattr(self, field) < 0.001:
                raise ConfigError(field, getattr(self, field), "must be at least 0.001 s")
        if self.linger_s < 0:
            raise ConfigError("linger_s", self.linger_s, "must not be negative: nothing waits for ever")
        if self.message_bytes_max > MESSAGE_BYTES_LIMIT:
            raise ConfigError("message_bytes_max", self.message_bytes_max, f"must be at most {MESSAGE_BYTES_LIMIT}")
        if self.queue_bytes_max < self.message_bytes_max + PREFIX_BYTES:
            fix = f"must hold one message: at least message_bytes_max + {PREFIX_BYTES}"
            raise ConfigError("queue_bytes_max", self.queue_bytes_max, fix)
        if self.reconnect_interval_max_s < self.reconnect_interval_s:
            fix = "must be at least reconnect_interval_s"
            raise ConfigError("reconnect_interval_max_s", self.reconnect_interval_max_s, fix)


PREFIX_BYTES = 4
"""The length prefix of a message on a byte stream."""

IDENTITY_BYTES_MAX = 255

MESSAGE_BYTES_LIMIT = 1 << 30
"""No configuration may allow longer messages: they would no longer be control messages."""


class LinkStatistics(msgspec.Struct):
    """Counts since the endpoint was opened, and the connections open now.

    `sends_full` and `sends_unreachable` are messages that `send` did not take. `messages_oversized` and
    `messages_malformed` came in and were dropped. `peers_refused` failed the handshake or came on top of `peers_max`.
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    sends_full: int = 0
    sends_unreachable: int = 0
    messages_oversized: int = 0
    messages_malformed: int = 0
    peers_connected: int = 0
    peers_lost: int = 0
    peers_refused: int = 0

    def count_send(self, result: SendResult, size_bytes: int) -> None:
        """Count one message that `send` took or did not take."""
        if result is SENT:
            self.messages_sent += 1
            self.bytes_sent += size_bytes
        elif result is FULL:
            self.sends_full += 1
        else:
            self.sends_unreachable += 1

    def snapshot(self) -> "LinkStatistics":
        """A copy that no longer changes."""
        return msgspec.structs.replace(self)


class Listener(Protocol):
    """The server side: many peers, each named by bytes."""

    @property
    def address(self) -> str:
        """Where peers connect to, with the port or name that the system picked."""

    def send(self, peer: bytes, payload: bytes) -> SendResult:
        """Queue one message. Raises `FrameOversized` when it is longer than this end's own limit."""

    def statistics(self) -> LinkStatistics: ...

    async def close(self, linger_s: float | None = None) -> None:
        """Deliver what is queued for at most `linger_s` (None: the limit's), then drop it. Twice is harmless."""


class Connection(Protocol):
    """The client side: one peer."""

    @property
    def address(self) -> str: ...

    @property
    def connected(self) -> bool: ...

    async def wait_connected(self) -> None:
        """Return when connected. Raises `PeerUnavailable` after `connect_timeout_s`, and at once when closed."""

    def send(self, payload: bytes) -> SendResult:
        """Queue one message. Raises `FrameOversized` when it is longer than this end's own limit."""

    def statistics(self) -> LinkStatistics: ...

    async def close(self, linger_s: float | None = None) -> None:
        """As `Listener.close`."""


class BorrowedConnection(Connection, Protocol):
    """A connection whose reading end another thread than the event loop's may borrow. See `node_connection`."""

    def borrow(self) -> bool: ...

    def pump(self, timeout_s: float) -> bool: ...

    def interrupt(self) -> None: ...

    def give_back(self) -> None: ...


class Transport(Protocol):
    """Opens endpoints of one kind. What is particular (keys, a network) belongs to the implementation."""

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Parted | None = None,
    ) -> Listener:
        """Start to serve. Raises `ConfigError` when the address is wrong, taken or not allowed.

        `on_lost` is called where the transport knows a lost peer by name, `on_parted` where it does not (ZeroMQ).
        """

    async def open_connection(
        self,
        address: str,
        identity: bytes,
        *,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        limits: LinkLimits,
        on_absent: Absent | None = None,
    ) -> Connection:
        """Start to connect. Raises `ConfigError` when the address is wrong or not allowed.

        `on_connected` and `on_lost` alternate; `on_absent` may be called any number of times while not connected. After
        a loss ZeroMQ and loopback connect again by themselves; a Unix connection is connected when this returns (or
        `PeerUnavailable` is raised) and, once lost, stays lost.
        `identity` is the name that the listener sees, 1 to 255 bytes that do not start with zero; two peers must not
        use one at the same time. On Unix sockets the listener numbers its connections and `identity` is not used.
        """


def check_message_size(payload: bytes, message_bytes_max: int) -> None:
    """Refuse to send what no peer with the same limits would take. Raises `FrameOversized`."""
    if len(payload) > message_bytes_max:
        raise FrameOversized(f"message to send is longer than message_bytes_max={message_bytes_max}", len(payload))


def check_identity(identity: bytes) -> None:
    """Raises `UsageError` unless peers can be told apart by it."""
    if not 1 <= len(identity) <= IDENTITY_BYTES_MAX or identity[0] == 0:
        fix = f"must be 1 to {IDENTITY_BYTES_MAX} bytes and not start with zero"
        raise UsageError("identity", identity, fix)
