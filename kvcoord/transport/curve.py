"""Keys for links over TCP: who may connect, and how a file with keys looks. Knows neither groups nor ranks.

Both ends prove that they hold their secret key (CurveZMQ) and everything between them is encrypted. A key directory
has `server.secret`, `server.public`, `client.secret`, `client.public` and `authorised_clients`, each key one line of 40
Z85 characters. A coordinator needs the first two and the last; a rank the other two and `server.public`.
"""

import asyncio
import os
import stat
import struct
from pathlib import Path
from typing import cast

import msgspec
import zmq
from zmq.utils import z85

from kvcoord.errors import ConfigError

KEY_CHARACTERS = 40

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"kvcoord"
_SECRET_MODE = 0o600
_PUBLIC_MODE = 0o644


class CurveServerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a listener needs. Only holders of an authorised client key may connect."""

    public: bytes
    secret: bytes
    authorised_clients: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"CurveServerKeys(public={self.public!r}, authorised_clients={self.authorised_clients!r})"


class CurveClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection needs."""

    public: bytes
    secret: bytes
    server_public: bytes

    def __repr__(self) -> str:
        return f"CurveClientKeys(public={self.public!r}, server_public={self.server_public!r})"


def generate_keys(directory: str | os.PathLike[str]) -> None:
    """Write a new key pair for a server and one for its clients, secrets readable by this user only.

    Creates the directory (mode 0700) when it is missing. Raises `ConfigError` rather than replace a key.
    """
    folder = Path(directory)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    _write_key(folder / "server.secret", server_secret, _SECRET_MODE)
    _write_key(folder / "server.public", server_public, _PUBLIC_MODE)
    _write_key(folder / "client.secret", client_secret, _SECRET_MODE)
    _write_key(folder / "client.public", client_public, _PUBLIC_MODE)
    _write_key(folder / "authorised_clients", client_public, _PUBLIC_MODE)


def load_server_keys(directory: str | os.PathLike[str]) -> CurveServerKeys:
    """Read a coordinator's keys. Raises `ConfigError` for a missing, malformed or widely readable file."""
    folder = Path(directory)
    return CurveServerKeys(
        public=_read_keys(folder / "server.public")[0],
        secret=_read_secret(folder / "server.secret"),
        authorised_clients=tuple(_read_keys(folder / "authorised_clients")),
    )


def load_client_keys(directory: str | os.PathLike[str]) -> CurveClientKeys:
    """Read a rank's keys. Raises `ConfigError` for a missing, malformed or widely readable file."""
    folder = Path(directory)
    return CurveClientKeys(
        public=_read_keys(folder / "client.public")[0],
        secret=_read_secret(folder / "client.secret"),
        server_public=_read_keys(folder / "server.public")[0],
    )


def secure_server(socket: "zmq.Socket[bytes]", keys: CurveServerKeys) -> None:
    """Make a socket refuse everybody who is not authorised. A `Gatekeeper` must be at work before it is bound."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    # Without this ZeroMQ would let everybody in when no gatekeeper answers.
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: "zmq.Socket[bytes]", keys: CurveClientKeys) -> None:
    """Make a socket prove who it is, and accept only that server."""
    socket.set(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)


class Gatekeeper:
    """Answers ZeroMQ's question whether a client key may connect (ZAP, ZeroMQ RFC 27), on the event loop."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", authorised_clients: tuple[bytes, ...]) -> None:
        self._authorised = frozenset(z85.decode(key) for key in authorised_clients)
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)
        self._descriptor = cast(int, self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._answer)

    def close(self) -> None:
        """Answer no more: nobody new can connect."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._verdict(request))

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        """A request is version, id, domain, address, identity, mechanism, key; a reply echoes the first two."""
        version, request_id, domain, _, _, mechanism, *credentials = request
        known = domain == _ZAP_DOMAIN and mechanism == b"CURVE" and credentials and credentials[0] in self._authorised
        status, text = (b"200", b"OK") if known else (b"400", b"client key is not authorised")
        return [version, request_id, status, text, b"", b""]


def _write_key(path: Path, key: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise ConfigError("directory", str(path.parent), f"{path.name} exists: choose an empty directory") from error
    with open(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(key + b"\n")


def _read_secret(path: Path) -> bytes:
    secret = _read_keys(path)[0]
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError("directory", str(path.parent), f"others may read {path.name}: chmod 600 {path}")
    return secret


def _read_keys(path: Path) -> list[bytes]:
    """The keys in a file, one a line; at least one."""
    try:
        lines = path.read_bytes().split()
    except OSError as error:
        fix = f"cannot read {path.name} ({error.strerror}): write keys with generate_keys"
        raise ConfigError("directory", str(path.parent), fix) from error
    for line in lines:
        if not _is_key(line):
            fix = f"{path.name}: a key is {KEY_CHARACTERS} Z85 characters"
            raise ConfigError("directory", str(path.parent), fix)
    if not lines:
        raise ConfigError("directory", str(path.parent), f"{path.name} has no key")
    return lines


def _is_key(line: bytes) -> bool:
    if len(line) != KEY_CHARACTERS:
        return False
    try:
        z85.decode(line)
    except (KeyError, struct.error):
        return False
    return True
