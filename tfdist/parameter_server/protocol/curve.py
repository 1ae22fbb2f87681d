"""Encryption between workers and parameter servers, by the secret of their job.

ZeroMQ's CURVE needs a pair of keys on each side, and a client has to know the server's public key. Both pairs are made
from the job's secret, and no key is ever sent in the clear. So a worker without the secret cannot complete the
handshake, nor can a server that a worker would believe.

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
"""By which a frame becomes longer."""

_SIDES = (b"server", b"client")


@dataclass(frozen=True)
class Keys:
    """The keys of a job.

    Attributes:
        server: the servers' private key, 40 characters of Z85.
        client: the workers' private key.
    """

    server: bytes
    client: bytes

    @classmethod
    def of_secret(cls, secret: bytes) -> Keys | None:
        """The keys that a secret gives; None without a secret.

        Args:
            secret: of the job; may be empty.

        Raises:
            TfdistError: this ZeroMQ has no CURVE.
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
        """Has a socket accept only those who know the secret. Before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self.server
        socket.curve_publickey = zmq.curve_public(self.server)

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Has a socket talk only to servers that know the secret. Before it is connected."""
        socket.curve_serverkey = zmq.curve_public(self.server)
        socket.curve_secretkey = self.client
        socket.curve_publickey = zmq.curve_public(self.client)
