"""The other end of a link in a process of its own, for tests that kill or stop it.

`connect KIND ADDRESS` connects, says hello and then writes `heard PAYLOAD` for each message; `leave KIND ADDRESS` says
"leaving", closes and ends at once; `serve KIND ADDRESS` serves and writes its address. KIND is `zeromq`, `unix` or
`node`.
"""

import asyncio
import sys

from kvcoord.transport.link import LinkLimits, SendResult, Transport
from kvcoord.transport.node import NodeTransport
from kvcoord.transport.unix import UnixTransport
from kvcoord.transport.zeromq import ZeromqTransport

LIMITS = LinkLimits(queue_messages_max=4)
TRANSPORTS: dict[str, Transport] = {
    "zeromq": ZeromqTransport(insecure_tcp=True),
    "unix": UnixTransport(),
    "node": NodeTransport(),
}


def tell(line: str) -> None:
    print(line, flush=True)


async def connect(transport: Transport, address: str, first: bytes) -> None:
    connection = await transport.open_connection(
        address,
        b"child",
        on_batch=lambda batch: tell(f"heard {batch[-1]!r}"),
        on_connected=lambda: None,
        on_lost=lambda cause: None,
        limits=LIMITS,
    )
    await connection.wait_connected()
    assert connection.send(first) is SendResult.SENT
    if first == b"leaving":
        await connection.close(linger_s=5)
    else:
        await asyncio.Event().wait()


async def serve(transport: Transport, address: str) -> None:
    listener = await transport.open_listener(
        address, on_batch=lambda batch: None, on_lost=lambda peer, cause: None, limits=LIMITS
    )
    tell(listener.address)
    await asyncio.Event().wait()


async def main(role: str, kind: str, address: str) -> None:
    transport = TRANSPORTS[kind]
    if role == "serve":
        await serve(transport, address)
    else:
        await connect(transport, address, b"leaving" if role == "leave" else b"hello")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
