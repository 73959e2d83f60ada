"""Messages to the coordinator can be kept back for a moment, so that an engine's answers go out first."""

from kvcoord.config.process import WorkerConfig
from kvcoord.runtime.uplink import Uplink
from kvcoord.transport.link import LinkLimits


def never() -> None:
    raise AssertionError("there is no connection to lose")


def uplink() -> Uplink:
    """One without a connection and with room for a single message: what it takes shows in what it refuses."""
    limits = LinkLimits(queue_messages_max=1)
    return Uplink(WorkerConfig(rank=0), None, limits, lambda _: None, on_lost=never, on_absent=never)


def test_what_is_kept_back_is_sent_when_it_is_released() -> None:
    up = uplink()
    up.hold()
    for payload in (b"frame", b"ack", b"vote"):
        up.send(payload)
    assert up.sends_refused == 0
    up.release()
    assert up.sends_refused == 2


def test_once_released_nothing_is_kept_back() -> None:
    up = uplink()
    up.hold()
    up.release()
    up.release()
    up.send(b"frame")
    up.send(b"ack")
    assert up.sends_refused == 1


async def test_what_is_kept_back_is_meant_for_the_coordinator_before_and_not_for_the_next() -> None:
    up = uplink()
    up.hold()
    up.send(b"leave")
    up.attach(0, 1)
    up.send(b"hello")
    assert up.sends_refused == 0
    await up.close()
