"""Messages on a byte stream: a 4-byte little-endian length, then the payload. Knows no socket."""

from kvcoord.transport.link import PREFIX_BYTES


def prefix_length(payload: bytes) -> bytes:
    """The bytes to write for one message."""
    return len(payload).to_bytes(PREFIX_BYTES, "little") + payload


class MessageSplitter:
    """Turns the chunks of a stream back into messages, however the stream was cut."""

    __slots__ = ("_message_bytes_max", "_partial", "refused_bytes")

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._partial = bytearray()
        self.refused_bytes: int | None = None
        """The length announced by a prefix beyond the limit. The stream cannot be read further."""

    @property
    def partial_bytes(self) -> int:
        """Bytes of a message whose rest has not come."""
        return len(self._partial)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The messages that end in `chunk`. Once a prefix was refused, always none."""
        if self.refused_bytes is not None:
            return []
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
            size_bytes = int.from_bytes(data[start : start + PREFIX_BYTES], "little")
            if size_bytes > self._message_bytes_max:
                self.refused_bytes = size_bytes
                break
            body = start + PREFIX_BYTES
            if end - body < size_bytes:
                break
            start = body + size_bytes
            messages.append(bytes(data[body:start]))
        return messages, start
