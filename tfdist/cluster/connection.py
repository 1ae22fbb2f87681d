"""Connects a task to the rendezvous server, with retries until a deadline and a mutual proof of membership."""

from __future__ import annotations

import socket
import time

from tfdist.cluster import messages, proof
from tfdist.cluster.messages import Claims, Welcome
from tfdist.cluster.spec import split_address
from tfdist.errors import RendezvousError

_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 30.0


def connect(address: str, claims: Claims, secret: bytes, timeout: float) -> tuple[socket.socket, Welcome]:
    """Connects to the rendezvous server and gets this task admitted.

    Args:
        address: ``host:port`` of the server.
        claims: this task's statement about itself.
        secret: the job's secret, or empty bytes.
        timeout: seconds to wait for the server to come up.

    Returns:
        The connected socket, and the server's `Welcome`.

    Raises:
        RendezvousError: the server cannot be reached, is not this job's server, or refuses this task.
    """
    deadline = time.monotonic() + timeout
    host, port = split_address(address)
    reason = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=min(10.0, remaining))
        except OSError as error:
            reason = str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        try:
            welcome = _handshake(connection, address, claims, secret, deadline)
        except OSError as error:
            connection.close()
            reason = f"the handshake failed: {error}"
            time.sleep(_RETRY_SECONDS)
            continue
        except BaseException:
            connection.close()
            raise
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        return connection, welcome
    raise RendezvousError(
        f"the chief at {address} could not be reached within {timeout:g} s ({reason}). Missing: the chief. Start it, "
        "check that its address in TF_CONFIG is right and reachable from here, or raise TFDIST_START_TIMEOUT."
    )


def _handshake(connection: socket.socket, address: str, claims: Claims, secret: bytes, deadline: float) -> Welcome:
    line = _read_line(connection, deadline)
    try:
        challenge = messages.challenge(line)
    except ValueError:
        raise _no_server(address) from None
    if challenge.tfdist != messages.PROTOCOL:
        raise RendezvousError(
            f"the rendezvous server at {address} runs another version of tfdist (expected protocol "
            f"{messages.PROTOCOL}, got {challenge.tfdist}). Install the same version on every task."
        )
    nonces = (challenge.nonce, proof.nonce())
    proven = proof.prove(secret, "task", nonces, claims)
    connection.sendall(messages.encode(messages.Hello(claims, nonces[1], proven)))
    line = _read_line(connection, deadline)
    try:
        answer = messages.answer(line)
    except ValueError:
        raise _no_server(address) from None
    if isinstance(answer, messages.AdmissionRefused):
        raise RendezvousError(f"the chief at {address} refused this task: {answer.why}")
    if not proof.is_proven(answer.proof, proof.prove(secret, "server", nonces, [answer.task, answer.job])):
        raise RendezvousError(
            f"the process that answers at {address} could not prove that it knows the job's secret: it is not this "
            "job's chief. Check the chief's address in TF_CONFIG."
        )
    return answer


def _no_server(address: str) -> RendezvousError:
    return RendezvousError(
        f"the process that answers at {address} is not a rendezvous server of tfdist. Check that no other program uses "
        "the chief's port."
    )


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """Reads one line byte by byte, because the bytes after it are for the listening thread."""
    end = min(deadline, time.monotonic() + _ANSWER_SECONDS)
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= messages.MAX_HANDSHAKE_LINE:
        if (remaining := end - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(remaining)
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("the connection was closed before the answer")
        line += byte
    return bytes(line)
