"""Strategies of several ranks, which are threads of one process (`tests.engine.ranks`)."""

import types

import tensorflow as tf

from tfdist.compression.compressor import Compressor
from tfdist.local_sgd.intervals import Every
from tfdist.local_sgd.rounds import LocalSGD, Settings
from tfdist.local_sgd.rules import Averaging
from tfdist.strategies.all_reduce.extended import AllReduceExtended
from tfdist.strategies.all_reduce.sharded_extended import ShardedExtended
from tfdist.strategies.keras import keras_seams
from tfdist.strategies.rounds.rounds_extended import RoundsExtended


def model_of(strategy):
    """What has nothing of a model but its strategy, for hooks."""
    return types.SimpleNamespace(_distribute_strategy=strategy)


class Ranked(tf.distribute.Strategy):
    """As `tfdist.AllReduceStrategy`, for any group.

    Args:
        group: the ranks.
        compression: method that compresses gradients; None for no compression.
        devices: devices of each rank.
        arguments: other arguments of `AllReduceExtended`.
    """

    def __init__(self, group, compression=None, devices=("CPU:0",), **arguments):
        keras_seams.install()
        compressor = None if compression is None else Compressor(compression, group.rank, group.size)
        super().__init__(AllReduceExtended(self, group, list(devices), compressor, **arguments))
        self.rank = group.rank


class RankedShards(tf.distribute.Strategy):
    """As `tfdist.AllReduceStrategy(shard=…)`, for any group.

    Args:
        group: the ranks.
        extended: class of the strategy's `extended`, or a function that makes it.
        compression: method that compresses gradients; None for no compression.
    """

    def __init__(self, group, extended=ShardedExtended, compression=None):
        keras_seams.install()
        compressor = None if compression is None else Compressor(compression, group.rank, group.size, scatters=True)
        super().__init__(extended(self, group, ["CPU:0"], compressor))
        self.rank = group.rank


class RankedLocal(tf.distribute.Strategy):
    """As `tfdist.LocalSGDStrategy`, for any group.

    Args:
        group: the ranks.
        settings: settings of the rounds; by default weights are averaged after each second step.
        described: text that all ranks must have alike.
    """

    def __init__(self, group, settings=None, described=""):
        keras_seams.install()
        settings = settings or Settings(Every(2), Averaging)
        courses = LocalSGD(group, settings, None, described)
        super().__init__(RoundsExtended(self, group, ["CPU:0"], courses, True))
        self.rank = group.rank


def on_ranks(ranks, work, *arguments, **options):
    """What ``work(strategy, *arguments)`` returns on each of some `Ranks`."""
    return ranks(lambda group: work(Ranked(group, **options), *arguments))


def in_step(strategy, rows, total, function, *arguments):
    """Calls a function as the strategy's replica, in a step on shares.

    Args:
        strategy: strategy with one replica on each rank.
        rows: number of samples of the replica.
        total: number of samples of all replicas.
        function: function to call.
        arguments: arguments of the function.
    """
    shares = strategy.extended.shares

    def replica():
        shares.set_total(tf.cast(total, tf.int64))
        with shares.replica(tf.cast(rows, tf.int64)):
            return function(*arguments)

    return strategy.run(replica)
