"""The limits of one client, the same for both kinds. Pure."""

from typing import Final

import msgspec

from kvcoord.errors import ConfigError
from kvcoord.transport.link import PREFIX_BYTES, LinkLimits

CALL_TIMEOUT_S: Final = 90.0
CONNECT_TIMEOUT_S: Final = 5.0
LINGER_S: Final = 1.0
MESSAGE_BYTES_MAX: Final = 4 << 20
CALLS_OPEN_MAX: Final = 65536


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ConfigError for values that cannot work.

    `call_timeout_s` bounds each wait for an answer, a copy or an outcome. It is longer than the group deadline (60 s by
    default), so that a lost group is told by name. `message_bytes_max` is the worker's.
    """

    call_timeout_s: float = CALL_TIMEOUT_S
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    linger_s: float = LINGER_S
    message_bytes_max: int = MESSAGE_BYTES_MAX
    calls_open_max: int = CALLS_OPEN_MAX

    def __post_init__(self) -> None:
        if self.call_timeout_s < 0.001:
            raise ConfigError("call_timeout_s", self.call_timeout_s, "must be at least 0.001 s")
        if self.calls_open_max < 1:
            raise ConfigError("calls_open_max", self.calls_open_max, "must be at least 1")
        self.link_limits()

    def link_limits(self) -> LinkLimits:
        """The bounds of the socket. A call waits for room to be sent as long as for its answer."""
        return LinkLimits(
            queue_bytes_max=2 * (self.message_bytes_max + PREFIX_BYTES),
            message_bytes_max=self.message_bytes_max,
            connect_timeout_s=self.connect_timeout_s,
            send_timeout_s=self.call_timeout_s,
            linger_s=self.linger_s,
        )
