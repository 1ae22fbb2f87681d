"""Reductions of several tensors in one bucket."""

import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tests.compression.methods import ALL
from tests.compression.test_reduction import World, normals
from tfdist import compression as c
from tfdist.compression.compressor import Compressor, begin
from tfdist.compression.feedback import with_feedback
from tfdist.compression.fusion import fuse_reductions


def test_fused_reductions_equal_separate_ones():
    """All methods in one bucket, on all routes, for several steps; in as many messages as a few tensors would take."""
    size, choices = 3, [None, *map(with_feedback, ALL)]
    alone, fused = ([World(choice, size, (30, 40 + place)) for place, choice in enumerate(choices)] for _ in range(2))
    for _ in range(3):
        vectors = [normals(size, 30 * (40 + place)) for place in range(len(choices))]
        expected = [world.step(vector) for world, vector in zip(alone, vectors, strict=True)]
        outs = [[np.empty_like(array) for array in vector] for vector in vectors]
        reductions = [world.reductions(*pair) for world, *pair in zip(fused, vectors, outs, strict=True)]
        plans = [
            fuse_reductions([by_rank[rank] for by_rank in reductions], lambda nbytes: "ring") for rank in range(size)
        ]
        _, communicators = simulate(size, lambda rank, plans=plans: plans[rank])
        for wanted, results in zip(expected, outs, strict=True):
            for out in results:
                np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-8)
    for one, other in zip(alone, fused, strict=True):
        assert one.traffic == other.traffic
    # Two sums and maxima, one exchange, four gathers: those that agree on scalers gather in a round of their own.
    rounds = 3 * 2 * (size - 1) + (size - 1) + 4 * (size - 1)
    assert communicators[0].messages_sent <= rounds + 2
    sent = sum(world.traffic[0].sent_bytes for world in fused) / 3
    assert communicators[0].bytes_sent == pytest.approx(sent, rel=0.05)


def test_bucket_can_mix_compressed_and_plain_tensors():
    worlds = [World(None, 2, (60,)), World(with_feedback(c.PowerSGD(2)), 2, (40, 50)), World(None, 2, (70,))]
    vectors = [normals(2, int(np.prod(world.states[0].shape)), np.float16) for world in worlds]
    outs = [[np.empty_like(array) for array in vector] for vector in vectors]
    reductions = [world.reductions(*pair) for world, *pair in zip(worlds, vectors, outs, strict=True)]
    plans = [fuse_reductions([by_rank[rank] for by_rank in reductions], lambda nbytes: "ring") for rank in range(2)]
    simulate(2, lambda rank: plans[rank])
    for place in (0, 2):
        for out in outs[place]:
            np.testing.assert_array_equal(out, vectors[place][0] + vectors[place][1])
    assert outs[1][0].any()
    np.testing.assert_array_equal(outs[1][0], outs[1][1])


def test_a_bucket_is_cut_into_its_tensors():
    compressors = [Compressor(c.TopK(1.0), rank=rank, size=2) for rank in range(2)]
    vectors, outs = normals(2, 5000), [np.empty(5000, np.float32) for _ in range(2)]
    plans = []
    for compressor, vector, out in zip(compressors, vectors, outs, strict=True):
        compressor.register({"a": ("a/kernel", (50, 40)), "b": ("b/kernel", (30, 100))})
        tensors = [compressor.tensor(name, vector) for name in ("a", "b")]
        plans.append(begin(tensors, vector, out, lambda nbytes: "ring"))
    simulate(2, lambda rank: plans[rank])
    np.testing.assert_array_equal(outs[0], vectors[0] + vectors[1])
    np.testing.assert_array_equal(outs[1], outs[0])
    traffic = compressors[0].traffic()
    assert [traffic[path]["given_bytes"] for path in ("a/kernel", "b/kernel")] == [8000, 12_000]
    assert traffic["a/kernel"]["plain_bytes"] == 8000
    assert 8000 < traffic["a/kernel"]["sent_bytes"] < 8600
