"""A worker in a thread of its own, for the blocking client: it goes through a script with one engine."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import Answer, Answers, Call, FromEngine, Landed, Open, Opened
from kvcoord.transport.framing import MessageSplitter, prefix_length
from tests.client.values import INFO

C = TypeVar("C", bound=Call)


class Engine:
    """The worker's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.messages: list[list[Call]] = []
        self._socket = sock
        self._splitter = MessageSplitter(4 << 20)
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)
        self._received: list[list[tuple[int, Call]]] = []

    def calls(self) -> list[tuple[int, Call]]:
        """The calls of the next message."""
        while not self._received:
            chunk = self._socket.recv(65536)
            if not chunk:
                raise EOFError("the engine has closed")
            self._received += [self._decoder.decode(payload).calls for payload in self._splitter.feed(chunk)]
        calls = self._received.pop(0)
        self.messages.append([call for _, call in calls])
        return calls

    def expect(self, kind: type[C]) -> tuple[int, C]:
        """The only call of the next message."""
        ((number, call),) = self.calls()
        assert isinstance(call, kind)
        return number, call

    def open(self, info: Opened = INFO) -> None:
        self.answer((self.expect(Open)[0], info))
        self.messages.clear()

    def answer(self, *answers: tuple[int, Answer]) -> None:
        self.send(encode(Answers(list(answers))))

    def landed(self, operation: str, layers: int, error: str = "") -> None:
        self.send(encode(Landed(operation, layers, error)))

    def send(self, payload: bytes) -> None:
        self._socket.sendall(prefix_length(payload))


@contextmanager
def scripted(address: str, script: Callable[[Engine], None]) -> Iterator[None]:
    """Runs `script` for the engine that connects; what it raises, the test raises. Then its socket is closed."""
    failures: list[BaseException] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(address.removeprefix("ipc://"))
        server.listen()

        def serve() -> None:
            try:
                sock, _ = server.accept()
                with sock:
                    script(Engine(sock))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(30)
        assert not thread.is_alive()
        for failure in failures:
            raise failure
