"""Messages on a byte stream: a 4-byte little-endian length, then the payload. Knows no socket."""

import struct
from typing import Final

from kvcoord.transport.link import PREFIX_BYTES

_PREFIX: Final = struct.Struct("<I")
_length = _PREFIX.unpack_from


def prefix_length(payload: bytes) -> bytes:
    """The bytes to write for one message."""
    return len(payload).to_bytes(PREFIX_BYTES, "little") + payload


class MessageSplitter:
    """Turns the chunks of a stream back into messages, however the stream was cut.

    A message longer than `message_bytes_max` is passed over and counted, if it is not longer than `skip_bytes_max`
    (0: none is); beyond that the stream is refused, since it cannot be trusted to be one of ours.
    """

    __slots__ = ("_message_bytes_max", "_partial", "_skip_bytes", "_skip_bytes_max", "refused_bytes", "skipped")

    def __init__(self, message_bytes_max: int, skip_bytes_max: int = 0) -> None:
        self._message_bytes_max = message_bytes_max
        self._skip_bytes_max = skip_bytes_max
        self._partial = bytearray()
        self._skip_bytes = 0
        """Bytes that have yet to come of a message that is passed over."""
        self.refused_bytes: int | None = None
        """The length announced by a prefix beyond the limit. The stream cannot be read further."""
        self.skipped = 0
        """Messages passed over."""

    @property
    def partial_bytes(self) -> int:
        """Bytes of a message whose rest has not come."""
        return len(self._partial)

    def only(self, chunk: bytes) -> bytes | None:
        """The message that `chunk` is, if it is one whole message and nothing else: nearly all are. Else None."""
        size_bytes = len(chunk) - PREFIX_BYTES
        if not 0 <= size_bytes <= self._message_bytes_max or self._partial or self._skip_bytes:
            return None
        return chunk[PREFIX_BYTES:] if _length(chunk)[0] == size_bytes else None

    def feed(self, chunk: bytes) -> list[bytes]:
        """The messages that end in `chunk`. Once a prefix was refused, always none."""
        if self.refused_bytes is not None:
            return []
        if self._skip_bytes:
            chunk = self._skip(chunk)
        if not self._partial:
            messages, start = self._split(chunk)
            if start < len(chunk):
                self._partial += chunk[start:]
            return messages
        self._partial += chunk
        messages, start = self._split(self._partial)
        if start:
            del self._partial[:start]
        return messages

    def _split(self, data: bytes | bytearray) -> tuple[list[bytes], int]:
        """The whole messages in `data`, and where the first incomplete one starts."""
        messages: list[bytes] = []
        start, end = 0, len(data)
        while end - start >= PREFIX_BYTES:
            (size_bytes,) = _length(data, start)
            body = start + PREFIX_BYTES
            if size_bytes > self._message_bytes_max:
                if size_bytes > self._skip_bytes_max:
                    self.refused_bytes = size_bytes
                    break
                self.skipped += 1
                start = min(body + size_bytes, end)
                self._skip_bytes = body + size_bytes - start
                continue
            if end - body < size_bytes:
                break
            start = body + size_bytes
            messages.append(bytes(data[body:start]))
        return messages, start

    def _skip(self, chunk: bytes) -> bytes:
        """What follows the message that is passed over."""
        skipped = min(self._skip_bytes, len(chunk))
        self._skip_bytes -= skipped
        return chunk[skipped:]
