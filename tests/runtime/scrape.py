"""One request to the HTTP port of a process, and what its page of metrics says."""

import asyncio


async def get(address: str, path: str) -> str:
    """The whole answer, with its headers. `address` is host:port."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.decode()


async def samples(address: str) -> dict[str, float]:
    """Every sample of the page for Prometheus, by name and labels."""
    _, _, page = (await get(address, "metrics")).partition("\r\n\r\n")
    lines = [line for line in page.splitlines() if line.startswith("kvcoord_")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
