"""The blocking client when the worker dies, makes no sense, or time runs out."""

import socket

import pytest

import kvcoord
from kvcoord.client import reading
from kvcoord.client.blocking_channel import BlockingChannel
from kvcoord.client.options import ClientOptions
from kvcoord.errors import DeadlineExceeded, PeerUnavailable, UsageError
from kvcoord.protocol.local import (
    Allocate,
    Allocated,
    Failed,
    Free,
    LoadBack,
    Loaded,
    Match,
    Matched,
    Written,
)
from tests.client.scripted import Engine, scripted
from tests.client.values import A, B, committed


def test_a_killed_worker_fails_what_waits_and_what_comes(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        first, _ = engine.calls()
        engine.answer((first[0], Written(None, "write-through/4/0", 1)))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        write, match = cache.write_through_nowait([A], [1], deferred=True), cache.match_nowait([A])
        pending = write.wait()
        with pytest.raises(PeerUnavailable, match=address):
            match.wait()
        assert cache.closed
        with pytest.raises(PeerUnavailable):
            pending.result()
        with pytest.raises(PeerUnavailable):
            cache.match([A])


def test_a_worker_killed_while_a_layer_is_waited_for_is_noticed(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        engine.answer((engine.expect(LoadBack)[0], Loaded(committed("load-back/8/0"), "load-back/8/0", 2)))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        load = cache.load_back([A, B], [1, 2])
        with pytest.raises(PeerUnavailable):
            load.wait()


def test_a_worker_that_makes_no_sense_ends_the_session(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        engine.calls()
        engine.send(b"\x01garbage")

    with (
        scripted(address, script),
        kvcoord.connect_blocking(address) as cache,
        pytest.raises(PeerUnavailable, match="does not speak the protocol"),
    ):
        cache.match([A])


def test_nobody_at_the_address_and_a_worker_of_another_release_are_said_at_once(address: str) -> None:
    with pytest.raises(PeerUnavailable, match=address):
        kvcoord.connect_blocking(address)

    def script(engine: Engine) -> None:
        ((number, _),) = engine.calls()
        engine.answer((number, Failed("UsageError", ["version", 1, "use the same release"])))
        with pytest.raises(EOFError):
            engine.calls()

    with scripted(address, script), pytest.raises(UsageError, match="use the same release"):
        kvcoord.connect_blocking(address)


def test_what_is_queued_is_sent_before_closing_and_nothing_works_after(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        engine.expect(Match)
        with pytest.raises(EOFError):
            engine.calls()

    with scripted(address, script):
        with kvcoord.connect_blocking(address) as cache:
            ticket = cache.match_nowait([A])
        cache.close()
        with pytest.raises(PeerUnavailable, match="this client is closed"):
            ticket.wait()
        with pytest.raises(PeerUnavailable, match="this client is closed"):
            cache.match_nowait([A])


def test_a_wait_ends_at_its_deadline_and_what_comes_late_is_given_back(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(address.removeprefix("ipc://"))
        server.listen()
        channel = BlockingChannel(address, ClientOptions(call_timeout_s=0.02))
        peer, _ = server.accept()
        engine = Engine(peer)
        ticket = channel.ask(Allocate(2), reading.read_allocation)
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match=r"no answer to allocate within call_timeout_s=0\.02 s"):
                ticket.wait()
        allocate, _ = engine.expect(Allocate)
        match = channel.ask(Match(A), reading.read_match)
        channel.flush()
        number, _ = engine.expect(Match)
        engine.answer((allocate, Allocated(committed("allocate/1/0"), [[3, 4]])), (number, Matched(1, 0)))
        assert match.wait().pages == 1
        channel.flush()
        assert engine.expect(Free)[1] == Free([[3, 4]])
        channel.close()
        peer.close()


def test_a_worker_that_does_not_read_is_given_up(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(address.removeprefix("ipc://"))
        server.listen()
        channel = BlockingChannel(address, ClientOptions(call_timeout_s=0.02))
        ticket = channel.ask(Match(bytes(3 << 20)), reading.read_match)
        with pytest.raises(PeerUnavailable, match="no room to send"):
            ticket.wait()
        channel.close()
