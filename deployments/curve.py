"""Keys of the direct links: CURVE key pairs made at start, public halves handed out through Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq
import zmq.auth.thread


@dataclass(frozen=True)
class KeyPair:
    """One process's CURVE keys, in Z85 text."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> KeyPair:
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def serve(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket the server side: whoever connects must know `public` and be admitted."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret.encode()
        socket.curve_publickey = self.public.encode()

    def connect(self, socket: zmq.Socket[Any], server_public: str) -> None:
        """Make a socket the client side of the server that has `server_public`."""
        socket.curve_serverkey = server_public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.curve_publickey = self.public.encode()


class Admitted:
    """Public keys that may connect to the CURVE servers of one ZeroMQ context (ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._keys: set[bytes] = set()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)

    def admit(self, public: str) -> None:
        """Let a peer in."""
        self._keys.add(public.encode())

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator for every connection."""
        return key in self._keys

    def stop(self) -> None:
        """End the authenticator's thread."""
        self._authenticator.stop()
