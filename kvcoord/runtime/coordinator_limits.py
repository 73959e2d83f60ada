"""What a coordinator's configuration means for its machines and its sockets."""

from typing import Final

from kvcoord.config import CoordinatorConfig
from kvcoord.protocol.group import GroupLimits
from kvcoord.transport.link import LinkLimits

GROUP_FORGET_S: Final = 60.0
"""How long a group without members is remembered."""


def group_limits(config: CoordinatorConfig) -> GroupLimits:
    """The limits of every group of this coordinator."""
    timeouts, limits = config.timeouts, config.limits
    return GroupLimits(
        heartbeat_timeout_s=timeouts.heartbeat_timeout_s,
        prepare_timeout_s=timeouts.prepare_timeout_s,
        vote_timeout_s=timeouts.vote_timeout_s,
        round_timeout_s=timeouts.round_timeout_s,
        copy_timeout_s=timeouts.copy_timeout_s,
        operations_open_max=limits.operations_open_max,
        decisions_kept_max=limits.decisions_kept_max,
        rounds_kept_max=limits.rounds_kept_max,
        report_bytes_max=limits.report_bytes_max,
    )


def link_limits(config: CoordinatorConfig) -> LinkLimits:
    """The bounds of this coordinator's sockets."""
    limits, timeouts = config.limits, config.timeouts
    return LinkLimits(
        queue_messages_max=limits.queue_messages_max,
        queue_bytes_max=max(8 << 20, 2 * limits.message_bytes_max),
        message_bytes_max=limits.message_bytes_max,
        connect_timeout_s=timeouts.connect_timeout_s,
        linger_s=timeouts.linger_s,
    )


def wait_shortest_s(limits: GroupLimits) -> float:
    """No deadline of a machine with these limits is nearer than this when it comes about."""
    names = [name for name in limits.__struct_fields__ if name.endswith("_timeout_s")]
    return min(GROUP_FORGET_S, *(float(getattr(limits, name)) for name in names))
