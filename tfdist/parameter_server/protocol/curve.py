"""Encryption between workers and parameter servers, with keys made from the secret of their job.

ZeroMQ's CURVE needs a pair of keys on each side, and a client has to know the server's public key. Both pairs are made
from the job's secret, and no key is ever sent in the clear. So neither a worker nor a server can complete the handshake
without the secret.

References:
    CurveZMQ, https://rfc.zeromq.org/spec/26/.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from tfdist.errors import TfdistError

OVERHEAD_BYTES = 33
"""Bytes that encryption adds to a frame."""

_SIDES = (b"server", b"client")


@dataclass(frozen=True)
class Keys:
    """The private keys of a job.

    Attributes:
        server: the servers' private key, 40 characters of Z85.
        client: the workers' private key, 40 characters of Z85.
    """

    server: bytes
    client: bytes

    @classmethod
    def of_secret(cls, secret: bytes) -> Keys | None:
        """Returns the keys made from a secret; None without a secret.

        Args:
            secret: secret of the job; may be empty.

        Raises:
            TfdistError: this ZeroMQ was built without CURVE.
        """
        if not secret:
            return None
        if not zmq.has("curve"):
            raise TfdistError(
                "TFDIST_SECRET is set, but this ZeroMQ has been built without CURVE, by which connections to parameter "
                "servers are encrypted: install pyzmq from a wheel, or a libzmq with libsodium"
            )
        server, client = (hmac.digest(secret, b"tfdist parameter server: " + side, "sha256") for side in _SIDES)
        return cls(z85.encode(server), z85.encode(client))

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Makes a socket accept only peers that know the secret. To be called before the socket is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self.server
        socket.curve_publickey = zmq.curve_public(self.server)

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Makes a socket accept only servers that know the secret. To be called before the socket connects."""
        socket.curve_serverkey = zmq.curve_public(self.server)
        socket.curve_secretkey = self.client
        socket.curve_publickey = zmq.curve_public(self.client)
