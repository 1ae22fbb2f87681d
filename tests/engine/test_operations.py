"""What a rank without data does beside one with data, which is described to it over the rendezvous server."""

import ml_dtypes
import msgspec
import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.cluster.messages import StandIn
from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.engine import operations
from tfdist.engine.means import Division


def received(stand_in):
    """As another process gets it."""
    return msgspec.json.decode(msgspec.json.encode(stand_in), type=StandIn)


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"mpi"}))
@pytest.mark.parametrize("dtype", ["int8", "float32", ml_dtypes.bfloat16])
def test_a_rank_without_data_adds_nothing_to_a_sum(algorithm, dtype):
    made = [operations.all_reduce(np.arange(11).astype(dtype), algorithm) for _ in range(3)]
    buffers = [np.arange(11).astype(dtype) for _ in range(3)]

    def plan(rank):
        if rank == 1:
            return operations.without_data(received(made[0].stand_in))
        return operations.all_reduce(buffers[rank], algorithm).plan

    simulate(3, plan)
    for rank in (0, 2):
        np.testing.assert_array_equal(buffers[rank].astype(int), 2 * np.arange(11))


def test_a_rank_without_data_divides_its_chunk_of_a_mean():
    buffers = [np.full(7, rank + 1.0, np.float32) for rank in range(3)]
    made = [operations.all_reduce(buffer, "ring", division=Division(3, np.dtype(np.float32))) for buffer in buffers]

    def plan(rank):
        return operations.without_data(received(made[0].stand_in)) if rank == 1 else made[rank].plan

    simulate(3, plan)
    for rank in (0, 2):
        np.testing.assert_array_equal(buffers[rank], np.float32(4 / 3))


def test_all_reduce_with_source_leaves_the_source_unchanged():
    source, buffers = np.ones(4, np.float32), [np.empty(4, np.float32) for _ in range(2)]
    simulate(2, lambda rank: operations.all_reduce(buffers[rank], "ring", source=source).plan)
    assert (source == 1).all()
    assert all((buffer == 2).all() for buffer in buffers)


@pytest.mark.parametrize("combine", [np.maximum, np.minimum, np.multiply])
def test_only_sums_have_a_stand_in(combine):
    """Zeros would change a maximum, a minimum and a product."""
    assert operations.all_reduce(np.zeros(3), "ring", combine).stand_in is None
    assert operations.all_reduce(np.zeros(3), "ring").stand_in is not None


@pytest.mark.parametrize("shape", [(), (2,), (3, 0)])
def test_a_rank_without_data_gives_no_rows(shape):
    rows = np.ones((4, *shape), np.int16)
    operation = operations.all_gather_rows(rows)
    without = received(operation.stand_in)
    results, _ = simulate(2, lambda rank: operations.without_data(without) if rank else operation.plan)
    for gathered, counts in results:
        assert gathered.shape == rows.shape
        assert counts.tolist() == [4, 0]


def test_a_rank_without_data_takes_part_in_a_barrier():
    operation = operations.barrier()
    without = received(operation.stand_in)
    simulate(3, lambda rank: operations.without_data(without) if rank else operation.plan)


def test_plain_plan_becomes_an_operation_without_stand_in():
    plan = operations.barrier().plan
    assert operations.as_operation(plan) == operations.Operation(plan, None)
    operation = operations.barrier()
    assert operations.as_operation(operation) is operation
