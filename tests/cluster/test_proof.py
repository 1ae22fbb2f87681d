from tests.cluster.serving import claims_of
from tfdist.cluster import proof


def test_proof_depends_on_secret_side_challenge_and_claims():
    nonces = (proof.nonce(), proof.nonce())
    proven = proof.prove(b"secret", "task", nonces, claims_of(1))
    assert proof.is_proven(proven, proof.prove(b"secret", "task", nonces, claims_of(1)))
    for other in (
        proof.prove(b"other", "task", nonces, claims_of(1)),
        proof.prove(b"secret", "server", nonces, claims_of(1)),
        proof.prove(b"secret", "task", nonces[::-1], claims_of(1)),
        proof.prove(b"secret", "task", nonces, claims_of(0)),
        "",
        "ü",
    ):
        assert not proof.is_proven(other, proven)


def test_challenges_differ():
    assert len({proof.nonce() for _ in range(100)}) == 100
