"""Metrics of an epoch over all workers, without sockets."""

import numpy as np

from tfdist.parameter_server.dealing.merging import Merging
from tfdist.parameter_server.protocol.dealing import MergedMetrics, MergeMetrics
from tfdist.parameter_server.protocol.messages import Refused, Waiting

EPOCH = 0, 3


class Talk:
    """Workers of an epoch, and what they are answered."""

    def __init__(self, *workers):
        self.workers = {EPOCH: frozenset(workers)}
        self.merging = Merging(lambda key: self.workers.get(key, frozenset()))
        self.answers = {}

    def give(self, worker, *arrays, rules=None, epoch=EPOCH, names=()):
        rules = ("sum",) * len(arrays) if rules is None else rules
        message = MergeMetrics(worker, worker, 1, *epoch, rules, names)

        def answer(message, arrays):
            self.answers[worker] = message, [array.tolist() for array in arrays]

        self.merging.heard(message, list(map(np.float32, arrays)), answer)
        return self.answers[worker]


def test_metrics_are_summed_over_workers():
    talk = Talk(0, 1)
    assert talk.give(0, 1, [2, 3]) == (Waiting(0, (1,)), [])
    assert talk.give(1, 10, [20, 30]) == (MergedMetrics(1), [11, [22, 33]])
    assert talk.answers[0] == (MergedMetrics(0), [11, [22, 33]])


def test_each_metric_uses_its_own_reduction():
    talk, rules = Talk(0, 1), ("sum", "mean", "max", "min", "first")
    talk.give(1, 3, 3, 3, 3, 3, rules=rules)
    assert talk.give(0, 1, 1, 1, 1, 1, rules=rules)[1] == [4, 2, 3, 1, 1]


def test_merge_does_not_wait_for_a_lost_worker():
    talk = Talk(0, 1)
    talk.give(0, 1)
    talk.workers[EPOCH] = frozenset({0})
    talk.merging.settle()
    assert talk.answers[0] == (MergedMetrics(0), [1])


def test_a_message_that_comes_twice_counts_once():
    talk = Talk(0, 1)
    for _ in range(2):
        talk.give(0, 1)
    assert talk.give(1, 10) == (MergedMetrics(1), [11])
    assert talk.give(1, 10) == (MergedMetrics(1), [11])


def test_late_worker_gets_the_merged_metrics():
    talk = Talk(0)
    talk.give(0, 5)
    assert talk.give(1, 0) == (MergedMetrics(1), [5])
    talk.workers[EPOCH] = frozenset({1})
    for number in range(20):
        talk.give(0, number, epoch=(1, number))
    assert talk.give(1, 0) == (MergedMetrics(1), [0]), "or its own, if that was too long ago"


def test_different_metrics_are_refused():
    talk = Talk(0, 1)
    talk.give(0, 1)
    answer, _ = talk.give(1, 1, 2)
    assert isinstance(answer, Refused)
    assert "worker 1 has the metrics sum float32 (), sum float32 (), and worker 0 has sum float32 ()" in answer.why
    talk = Talk(0, 1)
    talk.give(0, 1, names=("mse",))
    answer, _ = talk.give(1, 1, names=("mape",))
    assert "worker 1 has the metrics mape, sum float32 (), and worker 0 has mse, sum float32 ()" in answer.why
    assert isinstance(talk.give(1, 1, rules=()), tuple)
    assert "1 arrays of metrics for 0 rules" in talk.answers[1][0].why
