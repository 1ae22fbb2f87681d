"""Which sums are made in shared memory; `tests/multiprocess/test_shared_sums.py` has the sums."""

import types

import tensorflow as tf

from tfdist.engine.shared_sums import SharedSums


def is_usable_in_a_graph(memory):
    usable = []
    sums = SharedSums(types.SimpleNamespace(memory=memory))
    tf.function(lambda: usable.append(sums.is_usable)).get_concrete_function()
    return usable == [True]


def test_graphs_of_processes_that_share_memory_sum_in_it():
    assert is_usable_in_a_graph("shared")
    assert not is_usable_in_a_graph(None)


def test_eager_sums_are_the_engines():
    assert not SharedSums(types.SimpleNamespace(memory="shared")).is_usable


def test_a_group_with_an_algorithm_or_of_threads_shares_no_memory(ranks):
    group = ranks(2).groups[0]
    assert group.memory is None
    group.engine.communicator.memory = types.SimpleNamespace(is_summed=lambda members: members == (0, 1))
    assert (group.memory is not None) == (group.algorithm == "auto")
    assert group.using("auto", None).memory is not None
    assert group.using("ring", None).memory is None
    assert group.using("auto", None).subgroup((0,)).memory is None
