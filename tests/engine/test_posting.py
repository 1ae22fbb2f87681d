"""Collectives of buckets: all are posted before the first is waited for."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.engine import operations
from tfdist.engine.posting import Begun, BucketJob, Posting, concatenated, split


class NotedSum(BucketJob):
    """The sum of a tensor, whose events are noted."""

    def __init__(self, tensor, name, events):
        super().__init__("sum", [tensor], [name])
        self._tensor, self._name, self._events = tensor, name, events

    def packed(self):
        return self._tensor

    def begin(self, array, weight):
        self._events.append(("begins", self._name))
        total = np.array(array) * (1 if weight is None else weight)

        def result(key):
            self._events.append(("ends", self._name))
            return total

        return Begun(operations.all_reduce(total, "ring"), result)

    def unpacked(self, total):
        return [total]


@pytest.mark.parametrize("in_graph", [False, True])
def test_all_buckets_begin_before_the_first_one_ends(ranks, in_graph):
    def work(group):
        events, posting = [], Posting(group)

        def run(*tensors):
            jobs = [NotedSum(tensor, name, events) for name, tensor in zip("abc", tensors, strict=True)]
            return posting.run(jobs, tf.constant(0.5, tf.float64))

        given = [tf.constant([float(size)] * size) for size in (1, 2, 3)]
        results = (tf.function(run) if in_graph else run)(*given)
        return [value.numpy().tolist() for (value,) in results], events

    for sums, events in ranks(2)(work):
        assert sums == [[1.0], [2.0, 2.0], [3.0, 3.0, 3.0]]
        assert events == [("begins", name) for name in "abc"] + [("ends", name) for name in "abc"]


def test_no_thread_is_woken_for_what_is_waited_for_at_once(ranks):
    def work(group):
        Posting(group).run([NotedSum(tf.constant([1.0]), "a", [])])
        alone = group.engine._thread
        Posting(group).run([NotedSum(tf.constant([1.0]), name, []) for name in "ab"])
        return alone is None, group.engine._thread is None

    assert ranks(2)(work) == [(True, False)] * 2


@pytest.mark.parametrize("gpus", [[], ["GPU:0"]])
def test_tensors_are_split_as_they_were_concatenated(monkeypatch, gpus):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    tensors = [tf.zeros([2, 3]), tf.ones([]), tf.fill([4], 2.0)]
    parts = split(concatenated(tensors), [tensor.shape for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        np.testing.assert_array_equal(part, tensor)
    assert concatenated(tensors[:1]) is tensors[0]
    assert split(tensors[0], [tensors[0].shape])[0] is tensors[0]
