"""The physical limit of a decision: a hub and N processes over raw Unix sockets, with no protocol at all.

The hub is a process of its own: `python -m kvcoord.load.bench.star PATH RANKS`. It waits for one number of every rank
and sends all of them the smallest. With one rank it is a ping-pong. What it cannot do is anything that a protocol is
for: a rank that is late or gone stops it for ever.
"""

import socket
import struct
import sys
from contextlib import suppress
from typing import Final

NUMBER: Final = struct.Struct("<q")


def main(path: str, ranks: int) -> int:
    """Serves until a rank ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(ranks)
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        members = [listener.accept()[0] for _ in range(ranks)]
    with suppress(ConnectionError):
        serve(members)
    return 0


def serve(members: list[socket.socket]) -> None:
    """One round after another."""
    size, smallest_of = NUMBER.size, min
    while True:
        numbers = []
        for member in members:
            number = member.recv(size)
            if not number:
                return
            numbers.append(NUMBER.unpack(number)[0])
        smallest = NUMBER.pack(smallest_of(numbers))
        for member in members:
            member.send(smallest)


class StarMember:
    """One rank's end."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)

    def smallest(self, number: int) -> int:
        """Blocks until all ranks have said a number."""
        self._socket.send(NUMBER.pack(number))
        agreed: int = NUMBER.unpack(self._socket.recv(NUMBER.size))[0]
        return agreed

    def close(self) -> None:
        self._socket.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
