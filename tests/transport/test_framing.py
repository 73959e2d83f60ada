"""Messages survive any cutting of the stream."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvcoord.transport.framing import MessageSplitter, prefix_length

MESSAGES = st.lists(st.binary(max_size=40), max_size=20)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(messages=MESSAGES, points=st.lists(st.integers(0, 10_000), max_size=30))
def test_however_the_stream_is_cut_the_messages_are_the_same(messages: list[bytes], points: list[int]) -> None:
    splitter = MessageSplitter(40)
    stream = b"".join(map(prefix_length, messages))
    assert [message for chunk in cut(stream, points) for message in splitter.feed(chunk)] == messages
    assert splitter.partial_bytes == 0
    assert splitter.refused_bytes is None


@given(messages=MESSAGES, excess=st.integers(1, 1000), points=st.lists(st.integers(0, 10_000), max_size=30))
def test_a_refused_prefix_ends_the_stream_after_all_messages_before_it(
    messages: list[bytes], excess: int, points: list[int]
) -> None:
    splitter = MessageSplitter(40)
    stream = b"".join(map(prefix_length, [*messages, bytes(40 + excess), b"never"]))
    assert [message for chunk in cut(stream, points) for message in splitter.feed(chunk)] == messages
    assert splitter.refused_bytes == 40 + excess


@given(data=st.binary(max_size=200))
def test_random_bytes_never_make_more_than_was_sent(data: bytes) -> None:
    splitter = MessageSplitter(40)
    messages = splitter.feed(data)
    assert sum(len(message) + 4 for message in messages) + splitter.partial_bytes == len(data)
