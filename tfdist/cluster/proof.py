"""The handshake's proofs: a mutual challenge and response.

Each side sends a random nonce. It proves that it knows the job's secret with an HMAC-SHA256 over the name of its side,
both nonces and its statement. So the secret is never sent, and an old answer cannot be used again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec


def nonce() -> str:
    """Returns a random challenge, as hexadecimal digits."""
    return secrets.token_hex(16)


def prove(secret: bytes, side: str, nonces: tuple[str, str], statement: object) -> str:
    """Returns the proof that one side knows the secret and makes a statement.

    Args:
        secret: the job's secret; empty bytes for a job without a secret, where the proof proves nothing.
        side: ``"task"`` or ``"server"``, so that one side's proof cannot be used as the other's.
        nonces: the server's nonce and the task's nonce.
        statement: a value that msgspec can encode as JSON.

    Returns:
        The proof, as hexadecimal digits.
    """
    return hmac.new(secret, msgspec.json.encode([side, *nonces, statement]), hashlib.sha256).hexdigest()


def is_proven(proof: str, expected: str) -> bool:
    """Compares two proofs in constant time."""
    return hmac.compare_digest(proof.encode(), expected.encode())
