"""Tensors get from worker to worker; edges are told apart by what they carry."""

import tensorflow as tf

from tfdist.engine.edges import Edges
from tfdist.pipeline.actions import Transfer, parse
from tfdist.pipeline.transport import Transport

SPECS = [tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.bool)]


def transfer(number):
    return Transfer(parse(f"0F{number}"), 1)


def test_tensors_can_be_received_in_any_order(ranks):
    def work(group):
        transport = Transport(Edges(group), "a model")
        if group.rank == 0:
            for number in range(3):
                tensors = [tf.fill([3, 2], float(number)), tf.constant([True, False, True])]
                transport.exchange(sent=[(transfer(number), 1, tensors)])
            return None
        received = transport.exchange(
            expected=[(transfer(0), 0, SPECS)], received=[(transfer(number), 0, SPECS) for number in (2, 1)]
        )
        received += transport.exchange(received=[(transfer(0), 0, SPECS)])
        for _, mask in received:
            assert mask.numpy().tolist() == [True, False, True]
        return [float(value[0, 0]) for value, _ in received]

    assert ranks(2)(work)[1] == [2.0, 1.0, 0.0]
