"""TensorFlow's own parameter servers, for comparison: `tf.distribute.ParameterServerStrategy` and `ClusterCoordinator`.

Keras 3's `fit` refuses this strategy, so the loop is the one of TensorFlow's tutorial on custom training loops: the
coordinator schedules a `tf.function` that takes batches from the worker's own dataset, and joins. Each call of the
function travels to the worker, so that several steps in one call are faster; the servers' addresses are on loopback.
"""

import contextlib
import json
import os
import sys
import time

import servers
import side_by_side

_UP = "listening"


@contextlib.contextmanager
def running(workers, parameter_servers):
    """Starts TensorFlow's servers as processes, and ends them.

    Args:
        workers: number of workers.
        parameter_servers: number of parameter servers.

    Yields:
        The cluster: addresses by job.
    """
    cluster = {
        job: [f"127.0.0.1:{side_by_side.free_port()}" for _ in range(count)]
        for job, count in (("worker", workers), ("ps", parameter_servers))
    }
    tasks = [(job, index) for job, addresses in cluster.items() for index in range(len(addresses))]
    with servers.children([[__file__, json.dumps(cluster), job, str(index)] for job, index in tasks]) as popens:
        for popen in popens:
            assert servers.line(popen) == _UP
        yield cluster


def serve(cluster, job, index):
    """One server, until its standard input ends."""
    import tensorflow as tf

    tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc")
    print(_UP, flush=True)
    sys.stdin.read()
    os._exit(0)  # the server has threads that cannot be ended


def train(cluster, make_model, make_dataset, steps_per_call, steps, readings):
    """Trains a model by Adam and the mean squared error.

    Args:
        cluster: addresses by job.
        make_model: called in the strategy's scope; returns a Keras model.
        make_dataset: called on each worker; returns an endless `tf.data` dataset of pairs.
        steps_per_call: steps of one call of the scheduled function.
        steps: number of steps of a reading.
        readings: number of readings.

    Returns:
        ``rates``, in steps per second; ``steps``, how many were scheduled; and ``iterations``, how many of them the
        optimizer has counted.
    """
    import keras
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    iterator = iter(coordinator.create_per_worker_dataset(make_dataset))

    def replica(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function
    def call(iterator):
        if steps_per_call == 1:
            strategy.run(replica, (next(iterator),))
        else:
            for _ in tf.range(steps_per_call):
                strategy.run(replica, (next(iterator),))

    def schedule(calls):
        for _ in range(calls):
            coordinator.schedule(call, (iterator,))
        coordinator.join()

    calls = max(1, steps // steps_per_call)
    schedule(calls)  # the first calls trace, on each worker
    before, rates = int(optimizer.iterations.numpy()), []
    for _ in range(readings):
        begun = time.perf_counter()
        schedule(calls)
        rates.append(calls * steps_per_call / (time.perf_counter() - begun))
    counted = int(optimizer.iterations.numpy()) - before
    return {"rates": rates, "steps": readings * calls * steps_per_call, "iterations": counted}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    serve(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
