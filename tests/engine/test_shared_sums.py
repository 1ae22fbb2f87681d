"""Which sums are made in shared memory; `tests/multiprocess/test_shared_sums.py` has the sums."""

import types

import pytest
import tensorflow as tf

from tfdist.engine import shared_sums
from tfdist.engine.shared_sums import SharedSums


def takes(tensors, memory="shared"):
    """Whether tensors of a graph are taken, of processes with and without such memory."""
    taken = []
    sums = SharedSums(types.SimpleNamespace(memory=memory))
    tf.function(lambda: taken.append(sums.takes(tensors()))).get_concrete_function()
    return taken == [True]


@pytest.mark.parametrize(
    ("elements", "expected"),
    [(0, False), (1, True), (shared_sums.LARGEST_BYTES // 4, True), (shared_sums.LARGEST_BYTES // 4 + 1, False)],
)
def test_sums_of_all_sizes_but_the_largest_are_taken(elements, expected):
    assert takes(lambda: [tf.zeros([elements - elements // 2]), tf.zeros([elements // 2])]) == expected


def test_sums_of_processes_without_shared_memory_are_not_taken():
    assert not takes(lambda: [tf.zeros([1])], None)


def test_eager_sums_are_not_taken():
    assert not SharedSums(types.SimpleNamespace(memory="shared")).takes([tf.zeros([1])])


def test_a_group_with_an_algorithm_or_of_threads_shares_no_memory(ranks):
    group = ranks(2).groups[0]
    assert group.memory is None
    group.engine.communicator.memory = types.SimpleNamespace(is_summed=lambda members: members == (0, 1))
    assert (group.memory is not None) == (group.algorithm == "auto")
    assert group.using("auto", None).memory is not None
    assert group.using("ring", None).memory is None
    assert group.using("auto", None).subgroup((0,)).memory is None
