"""Tensors get from worker to worker; edges are told apart by what they carry."""

import numpy as np
import tensorflow as tf

from tfdist.engine.edges import Edges
from tfdist.pipeline.actions import Transfer, parse
from tfdist.pipeline.transport import BetweenProcesses, WithinProcess

SPECS = [tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.bool)]


def tensors(number):
    return [tf.fill([3, 2], float(number)), tf.constant([True, False, True])]


def test_within_a_process():
    transport = WithinProcess()
    for number in range(3):
        transport.send(Transfer(parse(f"0F{number}"), 1), 0, tensors(number))
    for number in (2, 0, 1):
        transport.expect(Transfer(parse(f"0F{number}"), 1), 0, SPECS)
        value, _ = transport.receive(Transfer(parse(f"0F{number}"), 1), 0, SPECS)
        np.testing.assert_array_equal(value, np.full([3, 2], number))


def test_between_processes_in_any_order(ranks):
    def work(group):
        transport = BetweenProcesses(Edges(group), "a model")
        if group.rank == 0:
            for number in range(3):
                transport.send(Transfer(parse(f"0F{number}"), 1), 1, tensors(number))
            return None
        found = []
        for number in (2, 0, 1):
            transfer = Transfer(parse(f"0F{number}"), 1)
            transport.expect(transfer, 0, SPECS)
            value, mask = transport.receive(transfer, 0, SPECS)
            assert mask.numpy().tolist() == [True, False, True]
            found.append(float(value[0, 0]))
        return found

    assert ranks(2)(work)[1] == [2.0, 0.0, 1.0]
