"""The handshake's proofs: a mutual challenge and response.

Each side sends a random nonce. Each proves that it knows the job's secret with an HMAC-SHA256 over its side, both
nonces and its statement, so that the secret is never sent and an old answer cannot be used again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec


def nonce() -> str:
    """A random challenge, as hexadecimal digits."""
    return secrets.token_hex(16)


def prove(secret: bytes, side: str, nonces: tuple[str, str], statement: object) -> str:
    """The proof that one side knows the secret and makes a statement.

    Args:
        secret: the job's secret. When it has none the bytes are empty, and the proof proves nothing.
        side: ``"task"`` or ``"server"``, so that one side's proof cannot be used as the other's.
        nonces: the server's and the task's.
        statement: for JSON.

    Returns:
        Hexadecimal digits.
    """
    return hmac.new(secret, msgspec.json.encode([side, *nonces, statement]), hashlib.sha256).hexdigest()


def is_proven(proof: str, expected: str) -> bool:
    """Compares two proofs in constant time."""
    return hmac.compare_digest(proof.encode(), expected.encode())
