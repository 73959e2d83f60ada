"""How long each wait may take. Every wait has its own limit, started when that phase starts."""

import msgspec

from kvcoord.config.fields import Seconds, check_fields
from kvcoord.errors import ConfigError


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of waits, in seconds."""

    heartbeat_interval_s: Seconds = 0.5
    """A rank and its coordinator each send something at least this often, also when idle."""

    heartbeat_timeout_s: Seconds = 3.0
    """A peer that sent nothing for this long is lost."""

    join_timeout_s: Seconds = 30.0
    """All ranks must have said Hello within this time after the first one did."""

    gather_timeout_s: Seconds = 5.0
    """A rank that waits for others at one coordinator of several tries the next one after this time."""

    prepare_timeout_s: Seconds = 5.0
    """All ranks must have accepted a proposed epoch within this time."""

    vote_timeout_s: Seconds = 5.0
    """A participant that has not voted within this time makes the operation abort."""

    round_timeout_s: Seconds = 10.0
    """A rank whose frame is missing for this long after the first frame of its round is lost."""

    copy_timeout_s: Seconds = 30.0
    """A participant that has not acknowledged its copy within this time has failed it. A call that waits for its own
    rank's copy waits no longer either."""

    group_deadline_s: Seconds = 60.0
    """Calls wait at most this long for a suspended group to come together again, then raise GroupLost."""

    shutdown_timeout_s: Seconds = 5.0
    """A process that was asked to stop drains for at most this long."""

    linger_s: Seconds = 1.0
    """Messages still queued when a link closes are delivered for at most this long, then dropped."""

    connect_timeout_s: Seconds = 5.0
    """An address that has not answered within this time is given up for the next one."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                "heartbeat_timeout_s",
                self.heartbeat_timeout_s,
                f"must be at least twice heartbeat_interval_s={self.heartbeat_interval_s:g},"
                " or one late message loses a healthy rank",
            )
