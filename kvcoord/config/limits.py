"""How much of everything may exist at once. A limit that is reached is answered, never met with a drop."""

import msgspec

from kvcoord.config.fields import PositiveInt, check_fields


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on counts and sizes: they bound the memory of the coordinator and of every rank."""

    operations_open_max: PositiveInt = 4096
    """Operations of one group that may be undecided or copying at once, and leases of one engine; the next one is
    aborted (limit)."""

    decisions_kept_max: PositiveInt = 4096
    """Past decisions of one group kept for ranks that ask for them again."""

    rounds_kept_max: PositiveInt = 256
    """Past rounds of one group kept for ranks that ask for them again; must exceed the group's lag."""

    message_bytes_max: PositiveInt = 4 * 1024 * 1024
    """A longer message is refused before it is decoded."""

    queue_messages_max: PositiveInt = 4096
    """Messages that may wait to be sent to one peer."""

    groups_max: PositiveInt = 1024
    """Groups that one coordinator serves."""

    ranks_max: PositiveInt = 1024
    """World size that one group may have."""

    pages_per_operation_max: PositiveInt = 65536
    """Pages that one operation may name."""

    calls_waiting_max: PositiveInt = 65536
    """Calls of one engine that may wait in its worker; more are refused."""

    recorder_events_max: PositiveInt = 16384
    """Events that the flight recorder of one process remembers."""

    @property
    def report_bytes_max(self) -> int:
        """How much of a message may be entries, and how much verdicts, that a rank reports or is told of when its group
        comes together again."""
        return self.message_bytes_max // 3

    def __post_init__(self) -> None:
        check_fields(self)
