import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedLocal
from tests.sweeps import sweep
from tfdist.local_sgd.intervals import Every
from tfdist.local_sgd.rounds import Settings
from tfdist.local_sgd.rules import Averaging, Elastic, Outer
from tfdist.strategies.rounds import keras_rounds

rng = np.random.default_rng(0)
X = rng.normal(size=(12, 4)).astype(np.float32)
Y = (X @ rng.normal(size=(4, 1))).astype(np.float32)
START = [rng.normal(size=shape).astype(np.float32) for shape in ((4, 1), (1,))]


class Own(keras.Sequential):
    def train_step(self, data):
        logs = super().train_step(data)
        context = tf.distribute.get_replica_context()
        rank = tf.cast(0 if context is None else context.replica_id_in_sync_group, tf.float32) + 1
        return {"rank": rank, **logs, "text": tf.constant("a"), "deeper": {"inner": rank, "error": logs["mae"]}}


def built(kind=keras.Sequential, optimizer=keras.optimizers.SGD, **compiling):
    model = kind([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer(0.05), "mse", metrics=["mae"], **compiling)
    model.set_weights(START)
    return model


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def on_ranks(ranks, work, size=2, **settings):
    def of_rank(group):
        strategy = RankedLocal(group, Settings(**{"interval": Every(2), "rule": Averaging, **settings}))
        return work(strategy)

    return ranks(size)(of_rank)


def test_validation_has_settled_weights_and_all_samples(ranks):
    def work(strategy):
        with strategy.scope():
            model = built()
        history = model.fit(batches(), shuffle=False, verbose=0, validation_data=batches()).history
        return history, model.get_weights()

    (logs, weights), (other_logs, other_weights) = on_ranks(ranks, work)
    assert logs == other_logs
    plain = built(run_eagerly=True)
    plain.set_weights(weights)
    assert plain.evaluate(X, Y, verbose=0) == pytest.approx([logs["val_loss"][0], logs["val_mae"][0]], rel=1e-5)
    np.testing.assert_array_equal(weights[0], other_weights[0])


@pytest.mark.parametrize(("size", "rows", "rank"), [(2, 12, 1.5), (2, 11, 1 + 1 / 3), (2, 9, 1.0), (1, 9, 1.0)])
def test_custom_step_logs_are_averaged(ranks, size, rows, rank):
    """Over the samples of the last step, in which a process may have none."""

    def work(strategy):
        with strategy.scope():
            model = built(Own)
        return model.fit(batches().unbatch().take(rows).batch(4), shuffle=False, verbose=0).history

    logs, *_, other_logs = 2 * on_ranks(ranks, work, size)
    np.testing.assert_allclose([logs["rank"], other_logs["rank"]], rank)
    np.testing.assert_allclose([logs["inner"], other_logs["inner"]], rank, err_msg="Keras flattens them")
    assert sorted(logs) == ["error", "inner", "loss", "mae", "rank", "text"]
    assert logs["error"] == pytest.approx(logs["mae"])
    assert logs["loss"] == other_logs["loss"]
    assert logs["mae"] == other_logs["mae"]


class Numbers(keras.Sequential):
    """Gives a number of a batch to a metric, and returns both."""

    def __init__(self, layers):
        super().__init__(layers)
        self.mean = keras.metrics.Mean(name="mean")

    def train_step(self, data):
        logs = super().train_step(data)
        number = tf.reduce_mean(data[0][:, 0])
        self.mean.update_state(number)
        return {**logs, "number": number, "mean": self.mean.result()}


@pytest.mark.parametrize(("kind", "number"), [("shared", 2.0), ("own", 2.0), ("own of unknown length", 2.5)])
def test_numbers_count_samples_alike(ranks, kind, number):
    x = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [4, 0, 0, 0]], np.float32)

    def work(strategy):
        with strategy.scope():
            model = Numbers([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(3)
        if kind != "shared":  # two rows of the first process, and one of the second
            rows = [slice(0, 2), slice(2, 3)][strategy.rank]
            own = tf.data.Dataset.from_tensors((x[rows], x[rows, :1]))
            if kind != "own":
                own = own.filter(lambda x, y: True)
            data = strategy.distribute_datasets_from_function(lambda context: own)
        return model.fit(data, verbose=0).history

    for history in on_ranks(ranks, work):
        # The last step of data of unknown length finds none on any process, which then count alike.
        assert history["number"] == pytest.approx([number])
        assert history["mean"] == pytest.approx([2.0])


class Roots(keras.Sequential):
    """Returns logs that it computes from metrics."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "root": tf.sqrt(logs["loss"])}

    def test_step(self, data):
        logs = super().test_step(data)
        return {**logs, "root": tf.sqrt(logs["loss"])}


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_logs_computed_from_metrics_are_computed_from_those_of_all(ranks, steps_per_execution):
    def work(strategy):
        with strategy.scope():
            model = built(Roots, steps_per_execution=steps_per_execution)
        return model.fit(batches(), shuffle=False, verbose=0, validation_data=batches()).history

    logs, other_logs = on_ranks(ranks, work)
    assert logs == other_logs
    for name in ("", "val_"):
        assert logs[f"{name}root"][0] == pytest.approx(logs[f"{name}loss"][0] ** 0.5, rel=1e-6)


def accumulating(rate):
    return keras.optimizers.SGD(rate, momentum=0.9, gradient_accumulation_steps=2)


def scaling(rate):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate, clipnorm=0.5), initial_scale=8.0)


def scaling_sums(rate):
    return keras.optimizers.LossScaleOptimizer(accumulating(rate), initial_scale=8.0)


@pytest.mark.parametrize(
    ("size", "optimizer", "is_known"),
    [
        (2, keras.optimizers.SGD, True),
        (2, keras.optimizers.SGD, False),
        sweep(3, accumulating, True),
        (2, scaling, True),
        sweep(2, scaling_sums, True),
        (3, scaling_sums, True),
    ],
)
def test_steps_are_weighed_by_own_samples(ranks, size, optimizer, is_known):
    """The last batch has one row for one of the processes; the others take a step with gradients of zero."""
    rows = 4 + 4 + 1

    def work(strategy):
        with strategy.scope():
            model = built(optimizer=optimizer)
        data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(4)
        model.fit(data if is_known else data.filter(lambda x, y: True), verbose=0, shuffle=False)
        return model.get_weights()[0]

    expected = np.zeros((4, 1))
    for rank in range(size):
        alone = built(optimizer=optimizer)
        samples = 0
        for start in (0, 4, 8):
            part = np.array_split(np.arange(start, min(start + 4, rows)), size)[rank]
            samples += len(part)
            stand_in = part if len(part) else [0]
            alone.train_on_batch(X[stand_in], Y[stand_in], np.full(len(stand_in), float(len(part) > 0)))
        expected += samples * alone.get_weights()[0] / rows
    for result in on_ranks(ranks, work, size, interval=Every(100)):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_process_without_batches_does_not_block_others(ranks):
    """The process has no logs, and the other has logs of its custom step; metrics cover all processes."""

    def work(strategy):
        with strategy.scope():
            model = built(Own)
        model.build((None, 4))
        data = batches()
        dataset = strategy.distribute_datasets_from_function(lambda context: data.take(2 - 2 * strategy.rank))
        history = model.fit(dataset, verbose=0).history
        return history, model.get_weights()

    (logs, weights), (other_logs, other_weights) = on_ranks(ranks, work)
    assert logs["loss"] == other_logs["loss"]
    assert logs["mae"] == other_logs["mae"]
    assert logs["rank"] == [1]
    assert "rank" not in other_logs
    np.testing.assert_array_equal(weights[0], other_weights[0])


def test_wrapped_optimizer_counts_each_step_once(ranks, monkeypatch):
    taken = []

    def work(strategy):
        with strategy.scope():
            model = built(optimizer=lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)))
        original = strategy.extended.step_taken
        monkeypatch.setattr(
            strategy.extended, "step_taken", lambda optimizer: (taken.append(optimizer), original(optimizer))
        )
        model.run_eagerly = True
        model.fit(batches(), shuffle=False, verbose=0)
        return model.optimizer

    optimizers = on_ranks(ranks, work)
    assert len(taken) == 2 * 3
    assert set(map(id, taken)) == set(map(id, optimizers))


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_after_a_loop_weights_are_made_equal_first(ranks, name):
    def work(strategy):
        with strategy.scope():
            model = built()
            model.optimizer.build(model.trainable_variables)

        def replica():
            model.optimizer.apply([tf.fill([4, 1], 1.0 + strategy.rank), tf.zeros([1])], model.trainable_variables)

        strategy.run(replica)
        before = model.get_weights()[0]
        model.evaluate(batches(), verbose=0) if name == "evaluate" else model.predict(batches(), verbose=0)
        return before, model.get_weights()[0]

    (first, settled), (second, other_settled) = on_ranks(ranks, work, interval=Every(10))
    # A loop divides its losses by the number of replicas, whose gradients are summed: here the mean takes the sum.
    np.testing.assert_allclose(first - START[0], -0.05 * 2, rtol=1e-4)
    np.testing.assert_allclose(second - START[0], -0.1 * 2, rtol=1e-4)
    np.testing.assert_array_equal(settled, other_settled)
    np.testing.assert_allclose(settled, (first + second) / 2, rtol=1e-6)


def test_assigned_weights_survive_evaluate(ranks):
    """Trained, set back to the best weights, and evaluated."""

    def work(strategy):
        with strategy.scope():
            model = built()
            model.optimizer.build(model.trainable_variables)

        def replica():
            model.optimizer.apply([tf.fill([4, 1], 1.0 + strategy.rank), tf.zeros([1])], model.trainable_variables)

        for _ in range(3):
            strategy.run(replica)
        model.set_weights(START)
        loss = model.evaluate(X, Y, verbose=0)[0]
        return loss, model.get_weights()

    expected = built(run_eagerly=True).evaluate(X, Y, verbose=0)[0]
    for loss, weights in on_ranks(ranks, work, rule=lambda: Elastic(0.9).for_fragment(2, delay=0)):
        assert loss == pytest.approx(expected)
        np.testing.assert_array_equal(weights[0], START[0])


@pytest.mark.parametrize("ends", ["by a loop", "by an interrupt"])
def test_fit_begins_with_equal_weights(ranks, ends):
    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyError("interrupted")

    def work(strategy):
        with strategy.scope():
            model = built(run_eagerly=True)
        if ends == "by a loop":
            model.train_on_batch(X[strategy.rank :: 2], Y[strategy.rank :: 2])
        else:
            with pytest.raises(KeyError, match="interrupted"):
                model.fit(batches(), shuffle=False, verbose=0, callbacks=[Interrupts()])
        model.fit(batches(), shuffle=False, verbose=0)
        return model.get_weights()[0]

    first, second = on_ranks(ranks, work, interval=Every(5))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("rule", [sweep(Averaging), lambda: Outer(keras.optimizers.SGD(0.5, momentum=0.5))])
def test_callbacks_may_swap_weights(ranks, rule):
    """As `keras.callbacks.SwapEMAWeights` does, between the end of an epoch and the beginning of the next one.

    Steps are eager, as what is tested is between them.
    """

    class Swaps(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.kept = self.model.get_weights()
            self.model.set_weights(START)

        def on_epoch_begin(self, epoch, logs=None):
            if epoch:
                self.model.set_weights(self.kept)

    def work(strategy, callbacks):
        with strategy.scope():
            model = built(run_eagerly=True)
        return model.fit(batches(), shuffle=False, epochs=3, verbose=0, callbacks=callbacks).history["loss"]

    plain = on_ranks(ranks, lambda strategy: work(strategy, []), rule=rule)
    assert on_ranks(ranks, lambda strategy: work(strategy, [Swaps()]), rule=rule) == plain


class OwnLoss(keras.Sequential):
    def train_step(self, data):
        super().train_step(data)
        return {"loss": tf.constant(7.0), "other": tf.constant(1.0)}


def test_log_named_like_a_metric_keeps_its_value(ranks):
    def work(strategy):
        with strategy.scope():
            model = built(OwnLoss)
        return model.fit(batches(), shuffle=False, verbose=0).history

    for history in on_ranks(ranks, work):
        assert history == {"loss": [7.0], "other": [1.0]}


@pytest.mark.parametrize("where", ["on_epoch_begin", "on_train_batch_end"])
def test_evaluate_within_an_epoch_does_not_end_its_rounds(ranks, where):
    def work(strategy):
        with strategy.scope():
            model = built(run_eagerly=True)

        def evaluates(place, logs=None):
            model.evaluate(batches(), verbose=0)

        callback = keras.callbacks.LambdaCallback(**{where: evaluates})
        model.fit(batches(), shuffle=False, verbose=0, callbacks=[callback])
        return model.get_weights()[0]

    first, second = on_ranks(ranks, work, interval=Every(10))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("assigns", [True, False])
def test_a_new_optimizer_begins_with_the_weights_that_there_are(ranks, assigns):
    """The rule takes a part of the way from the values that it begins with."""

    def work(strategy):
        with strategy.scope():
            first, second = built(), built()
        first.fit(batches(), shuffle=False, verbose=0)
        weights = START if assigns else first.get_weights()
        with strategy.scope():
            first.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        if assigns:
            first.set_weights(START)
        second.set_weights(weights)
        for model in (first, second):
            model.fit(batches(), shuffle=False, verbose=0)
        return first.get_weights()[0], second.get_weights()[0]

    for renewed, new in on_ranks(ranks, work, rule=lambda: Elastic(0.9).for_fragment(2, delay=0)):
        np.testing.assert_array_equal(renewed, new)


class TwoOptimizers(keras.Sequential):
    """Each of its two layers has an optimizer of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients, half = tape.gradient(loss, self.trainable_variables), len(self.trainable_variables) // 2
        self.optimizer.apply(gradients[:half], self.trainable_variables[:half])
        self.second.apply(gradients[half:], self.trainable_variables[half:])
        return {"loss": loss}


def test_rounds_of_two_optimizers_end_together(ranks):
    """The first process has ended while the second one takes steps, which exchange for both optimizers in turn."""

    def work(strategy):
        with strategy.scope():
            model = TwoOptimizers([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05), "mse")
            model.second = keras.optimizers.SGD(0.05)
            for optimizer, layer in zip((model.optimizer, model.second), model.layers, strict=True):
                optimizer.build(layer.trainable_variables)
        steps = 2 + 5 * strategy.rank
        dataset = strategy.distribute_datasets_from_function(lambda context: batches().repeat().take(steps))
        model.fit(dataset, epochs=2, verbose=0)
        return model.get_weights()

    first, second = on_ranks(ranks, work)
    for weight, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_optimizers_that_share_a_variable_keep_all_steps(ranks):
    """One has exchanged it, the other one has then taken steps."""

    def work(strategy):
        with strategy.scope():
            model = built()
            optimizers = [keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.05)]

        def replica(number):
            variables = model.trainable_variables
            optimizers[number].apply([tf.ones([4, 1]), tf.zeros([1])], variables)

        for number in (0, 0, 1):
            strategy.run(replica, (number,))
        model.evaluate(X, Y, verbose=0)
        return model.get_weights()[0]

    for kernel in on_ranks(ranks, work):
        np.testing.assert_allclose(kernel, START[0] - 0.15 * 2, rtol=1e-5)


def test_state_of_layers_and_moving_averages_are_averaged(ranks):
    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.BatchNormalization()])
            model.compile(keras.optimizers.SGD(0.05, use_ema=True), "mse")
            model.optimizer.build(model.trainable_variables)
        model.layers[0].moving_mean.assign(np.full(4, float(strategy.rank)))
        average = model.optimizer._model_variables_moving_average[0]
        average.assign(np.full(4, float(strategy.rank)))
        keras_rounds.settle(model, strategy.extended)
        return float(model.layers[0].moving_mean.numpy()[0]), float(average.numpy()[0])

    assert on_ranks(ranks, work) == [(0.5, 0.5)] * 2


class Followed(keras.Model):
    """A layer, and another one that follows it, which the step updates by hand."""

    def __init__(self):
        super().__init__()
        self.one, self.follower = keras.layers.Dense(1), keras.layers.Dense(1)
        for layer in (self.one, self.follower):
            layer.build((None, 4))
        self.built = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.one(x) - y) ** 2)
        variables = self.one.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for variable, follower in zip(variables, self.follower.trainable_variables, strict=True):
            follower.assign(0.5 * follower + 0.5 * variable)
        return {"loss": loss}


def test_weights_that_no_optimizer_updates_are_averaged(ranks):
    def work(strategy):
        with strategy.scope():
            model = Followed()
            model.compile(keras.optimizers.SGD(0.05))
            model.optimizer.build(model.one.trainable_variables)
        model.fit(batches(), shuffle=False, epochs=2, verbose=0)
        return model.follower.get_weights()

    weights, other_weights = on_ranks(ranks, work)
    for value, its in zip(weights, other_weights, strict=True):
        np.testing.assert_array_equal(value, its)
