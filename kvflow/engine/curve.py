"""Curve: the keys of a control plane that crosses a network, derived from one shared secret.

ZeroMQ's CURVE encrypts every frame and refuses peers that do not prove their key before they have
said a word. Whoever holds the secret is trusted with everything.
"""

import hmac

import zmq
import zmq.asyncio
from attrs import field, frozen
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

HEARTBEAT_MS = 2_000
SILENCE_MS = 20_000
"""A peer whose host no longer answers counts as gone after this time."""


@frozen
class Curve:
    """Both ends' key pairs follow from `secret`, so none of them has to be handed around."""

    secret: bytes = field(repr=False)

    def guard(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> "Guard":
        """Makes `socket`, not bound yet, admit the holders of the secret alone. The guard works in
        the running event loop; stop it before the context ends."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._pair("front")
        _keep_alive(socket)
        guard = AsyncioAuthenticator(context)
        guard.start()
        guard.configure_curve_callback(
            domain="*", credentials_provider=_Only(z85.decode(self._pair("rank")[0]))
        )
        return guard

    def present(self, socket: "zmq.Socket[bytes]") -> None:
        """Makes `socket`, not connected yet, prove that it holds the secret, and demand that of the
        other end."""
        socket.curve_publickey, socket.curve_secretkey = self._pair("rank")
        socket.curve_serverkey = self._pair("front")[0]
        _keep_alive(socket)

    def _pair(self, role: str) -> tuple[bytes, bytes]:
        """Public and secret key of a role in ZeroMQ's text form."""
        secret = z85.encode(hmac.digest(self.secret, f"kvflow curve {role}".encode(), "sha256"))
        return zmq.curve_public(secret), secret


Guard = AsyncioAuthenticator


@frozen
class _Only:
    """Admits one public key."""

    _public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(z85.decode(key), self._public)


def _keep_alive(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
