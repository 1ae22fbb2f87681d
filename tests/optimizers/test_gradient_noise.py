import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.sweeps import some, sweep
from tfdist.optimizers import GradientNoise
from tfdist.strategies import current_strategy
from tfdist.strategies.server_abilities import UpdatesOnServers

PARTS, UPDATES, SHAPES = 3, 4, ((3, 2), (2,))
generator = np.random.default_rng(0)
BEGINNING = [generator.normal(size=shape) for shape in SHAPES]
STEPS = [[generator.normal(0.5, 2.0, size=shape) for shape in SHAPES] for _ in range(PARTS * UPDATES)]
SGD = keras.optimizers.SGD


def eagerly(function):
    """Takes the place of `tf.function` where few steps would take longer to trace."""
    return function


def applied(optimizer, steps=STEPS, dtype="float64", beginning=BEGINNING, function=tf.function):
    """The variables after an optimizer has applied gradients, one after another."""
    variables = [keras.Variable(tensor, dtype=dtype, name=f"kernel_{place}") for place, tensor in enumerate(beginning)]
    optimizer.build(variables)
    step = function(lambda gradients: optimizer.apply(gradients, variables))
    for gradients in steps:
        step([tensor if isinstance(tensor, tf.IndexedSlices) else tf.constant(tensor, dtype) for tensor in gradients])
    return [tensor.numpy() for tensor in variables]


def normal(seed, index, update, shape):
    folded = tf.constant([seed, index], tf.int64)
    for part in (update, 0):
        folded = tf.random.experimental.stateless_fold_in(folded, tf.constant(part, tf.int64))
    return tf.random.stateless_normal(shape, folded, dtype=tf.float64, alg="philox").numpy()


def reference(deviations, rate=0.125, momentum=0.5, seed=0, clip=np.inf):
    """SGD with momentum, whose mean gradients get noise.

    Args:
        deviations: returns the noise's deviations, from the gradients of the parts of an update.
        rate: learning rate.
        momentum: momentum of SGD.
        seed: seed of the noise.
        clip: the largest norm of a gradient with noise.
    """
    weights, momenta = [weight.copy() for weight in BEGINNING], [np.zeros(shape) for shape in SHAPES]
    for update in range(UPDATES):
        parts = STEPS[update * PARTS : (update + 1) * PARTS]
        of_noise = deviations([np.stack([part[place] for part in parts]) for place in range(len(SHAPES))])
        for place, shape in enumerate(SHAPES):
            gradient = np.mean([part[place] for part in parts], axis=0)
            gradient = gradient + of_noise[place] * normal(seed, place, update, shape)
            gradient = gradient * min(1, clip / np.linalg.norm(gradient))
            momenta[place] = momentum * momenta[place] - rate * gradient
            weights[place] = weights[place] + momenta[place]
    return weights


def diagonal(ratio):
    return lambda parts: [np.sqrt((ratio - 1) * gradients.var(axis=0, ddof=1) / PARTS) for gradients in parts]


def trace(ratio):
    def deviations(parts):
        variances = np.concatenate([gradients.var(axis=0, ddof=1).ravel() for gradients in parts])
        return [np.sqrt((ratio - 1) * variances.mean() / PARTS)] * len(parts)

    return deviations


@pytest.mark.parametrize("function", [tf.function, sweep(eagerly)], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("given", "of_inner", "expected"),
    [
        ({"ratio": 8}, {}, {"deviations": diagonal(8)}),
        ({"ratio": 2.5, "seed": 7}, {"clipnorm": 1.0}, {"deviations": diagonal(2.5), "seed": 7, "clip": 1.0}),
        ({"ratio": 8, "structure": "trace"}, {}, {"deviations": trace(8)}),
        (
            {"structure": "isotropic", "stddev": 0.5},
            {"clipnorm": 0.7},
            {"deviations": lambda _: [0.5] * 2, "clip": 0.7},
        ),
    ],
    ids=["diagonal", "clipped", "trace", "isotropic"],
)
def test_steps_are_those_of_the_formulas(given, of_inner, expected, function):
    inner = SGD(0.125, momentum=0.5, gradient_accumulation_steps=PARTS, **of_inner)
    for weight, other in zip(
        applied(GradientNoise(inner, **given), function=function), reference(**expected), strict=True
    ):
        np.testing.assert_allclose(weight, other, rtol=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(0.1, gradient_accumulation_steps=2, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), global_clipnorm=1.0),
        lambda: SGD(0.1, loss_scale_factor=4.0),
    ],
)
def test_without_noise_it_is_the_inner_optimizer(make):
    expected = applied(make())
    for wrapped in (GradientNoise(make(), ratio=1), GradientNoise(make(), structure="isotropic", stddev=0.0)):
        for weight, other in zip(applied(wrapped), expected, strict=True):
            np.testing.assert_array_equal(weight, other)


@pytest.mark.parametrize("structure", ["diagonal", "trace"])
def test_variances_are_those_of_a_smaller_batch(structure):
    """Many weights share each variance; both structures have the same trace, that of the variances."""
    deviations = np.repeat([0.1, 2.0, 0.0], 20_000)
    parts = [[1.0 + sign * deviations.reshape(3, -1), np.zeros(2)] for sign in (1, -1)]
    variances = 2 * deviations**2  # of the two parts, without bias
    beginning = [np.zeros((3, 20_000)), np.zeros(2)]
    inner = SGD(1.0, gradient_accumulation_steps=2)
    optimizer = GradientNoise(inner, 5, structure)
    noise = -1 - applied(optimizer, parts, beginning=beginning, function=eagerly)[0].ravel()
    expected = 4 * variances / 2
    np.testing.assert_allclose(np.mean(noise), 0, atol=0.03)
    np.testing.assert_allclose(np.sum(noise**2), np.sum(expected), rtol=0.03)
    for place in range(3):
        part = slice(20_000 * place, 20_000 * (place + 1))
        wanted = expected[part].mean() if structure == "diagonal" else expected.mean()
        np.testing.assert_allclose(np.mean(noise[part] ** 2), wanted, rtol=0.03)


def test_noise_is_new_in_each_update_and_for_each_variable():
    zero = [np.zeros((3, 2)), np.zeros((3, 2))]
    rows = []
    for seed in (0, 0, 1):
        for updates in (1, 2):
            optimizer = GradientNoise(SGD(1.0), structure="isotropic", stddev=1.0, seed=seed)
            rows.append(applied(optimizer, [zero] * updates, beginning=zero, function=eagerly))
    first, second, again, _, other, _ = rows
    np.testing.assert_array_equal(first, again)
    drawn = np.concatenate(
        [*(array.ravel() for array in (*first, *other)), *((b - a).ravel() for a, b in zip(first, second, strict=True))]
    )
    assert len(np.unique(drawn.round(6))) == len(drawn)


def test_sparse_gradients_get_noise_like_dense_gradients():
    shape = tf.constant([3, 2], tf.int64)
    sparse = [
        [tf.IndexedSlices(tf.fill([2, 2], value), tf.constant([0, 0]), shape)]
        for value in tf.constant([1.0, 3.0], tf.float64)
    ]
    dense = [[np.array([[2.0 * value] * 2, [0, 0], [0, 0]])] for value in (1.0, 3.0)]
    for given in ({"ratio": 4}, {"structure": "isotropic", "stddev": 1.0}):
        tables = [
            applied(
                GradientNoise(SGD(1.0, gradient_accumulation_steps=2), **given),
                steps,
                beginning=[np.ones((3, 2))],
                function=function,
            )
            for steps, function in ((sparse, tf.function), (dense, eagerly))
        ]
        np.testing.assert_allclose(*tables, rtol=1e-12)
    table = applied(GradientNoise(SGD(1.0), structure="isotropic", stddev=1.0), sparse, beginning=[np.zeros((3, 2))])[0]
    assert (table != 0).all()


def model_with(optimizer, **compiling):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **compiling)
    return model


X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")


def batches(rows=64):
    return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(8)


def fit(model, data=None, **how):
    model.fit(batches() if data is None else data, **{"epochs": 1, "shuffle": False, "verbose": 0, **how})
    return model


def inner_adam():
    return keras.optimizers.Adam(0.1, gradient_accumulation_steps=4, clipnorm=1.0)


@pytest.mark.parametrize(
    "given",
    [{"ratio": 9}, {"ratio": 3.0, "structure": "trace", "seed": 5}, sweep({"structure": "isotropic", "stddev": 0.1})],
)
def test_loaded_optimizer_continues_with_equal_updates(given, tmp_path):
    """Within an update: the sums of squared deviations are saved, as gradients are that Keras accumulates.

    Steps are eager, as graphs would take longer to trace than they train.
    """
    model = model_with(GradientNoise(inner_adam(), **given), run_eagerly=True)
    fit(model, batches(48))  # one update and a half
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert loaded.optimizer.structure == given.get("structure", "diagonal")
    assert type(loaded.optimizer.inner_optimizer) is keras.optimizers.Adam
    for variable, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())
    for variable, other in zip(fit(loaded).weights, fit(model).weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())


def test_rates_and_iterations_are_those_of_the_inner_optimizer():
    optimizer = GradientNoise(inner_adam(), ratio=2)
    rates = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1))]
    fit(model_with(optimizer, run_eagerly=True), epochs=2, callbacks=rates)
    assert float(optimizer.learning_rate) == float(optimizer.inner_optimizer.learning_rate) == 0.25
    assert int(optimizer.iterations) == 4
    optimizer.learning_rate = 0.125
    assert float(optimizer.inner_optimizer.learning_rate) == 0.125
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 8, 0.5)
    scheduled = GradientNoise(SGD(schedule, gradient_accumulation_steps=4), ratio=2)
    fit(model_with(scheduled, run_eagerly=True))
    np.testing.assert_allclose(float(scheduled.learning_rate), 0.25)
    with pytest.raises(ValueError, match="has its own schedule"):
        fit(model_with(scheduled), callbacks=[tfdist.callbacks.LearningRateScaling(0.1, factor=2)])


def test_loss_scaling_wraps_noise_and_skips_infinite_gradients():
    """Keras puts one around by itself."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = model_with(GradientNoise(inner_adam(), ratio=4))
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    assert type(model.optimizer.inner_optimizer) is GradientNoise
    losses = fit(model, epochs=30).history.history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    infinite = [[np.full(shape, np.inf) for shape in SHAPES]]
    inner = SGD(0.125, momentum=0.5, gradient_accumulation_steps=PARTS)
    scaled = keras.optimizers.LossScaleOptimizer(GradientNoise(inner, ratio=8), initial_scale=4.0)
    steps = [[4 * array for array in STEPS[0]], *infinite, *([2 * array for array in step] for step in STEPS[1:])]
    for array, other in zip(applied(scaled, steps), reference(diagonal(8)), strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-6)


def test_float16_variance_does_not_underflow():
    """Squares of gradients of 1e-4 are zero in float16."""
    parts = [[np.full((3, 2), 1e-4 * sign), np.zeros(2)] for sign in (1, -1)]
    optimizer = GradientNoise(SGD(1.0, gradient_accumulation_steps=2), ratio=100)
    kernel = applied(optimizer, parts, "float16", [np.zeros((3, 2)), np.zeros(2)], eagerly)[0]
    assert (kernel != 0).all()
    assert np.abs(kernel).max() < 0.01


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has none")
@pytest.mark.parametrize("outside", [True, False])
def test_noise_works_around_and_inside_multi_optimizer(outside):
    """Around it, all variables get noise; inside of it, those of the noisy optimizer."""

    def noisy(optimizer):
        return GradientNoise(optimizer, ratio=8)

    inner = [SGD(0.125, momentum=0.5, gradient_accumulation_steps=PARTS) for _ in SHAPES]
    if outside:
        weights = applied(noisy(keras.optimizers.MultiOptimizer(lambda variable: inner[int(variable.name[-1])])))
        expected = reference(diagonal(8))
    else:
        inner[0] = noisy(inner[0])
        weights = applied(keras.optimizers.MultiOptimizer(lambda variable: inner[int(variable.name[-1])]))
        expected = [reference(diagonal(8))[0], reference(lambda parts: [0.0] * 2)[1]]
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-9)


@pytest.mark.parametrize(
    "given", some([{"ratio": 8}, {"ratio": 8, "structure": "trace"}, {"structure": "isotropic", "stddev": 0.1}], 3)
)
def test_one_process_trains_alike_with_tfdist_and_without(given):
    tfdist.init()
    expected = fit(model_with(GradientNoise(inner_adam(), **given), run_eagerly=True), epochs=2)
    with tfdist.AllReduceStrategy().scope():
        in_scope = model_with(GradientNoise(inner_adam(), **given))
    around = model_with(tfdist.DistributedOptimizer(GradientNoise(inner_adam(), **given)))
    inside = model_with(GradientNoise(tfdist.DistributedOptimizer(inner_adam()), **given))
    for model in (in_scope, around, inside):
        for weight, other in zip(fit(model, epochs=2).weights, expected.weights, strict=True):
            np.testing.assert_allclose(weight.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


PARTLY = {"ratio": 2, "structure": "trace"}
EQUAL = {"structure": "isotropic", "stddev": 0.01}


@pytest.mark.parametrize(
    ("make", "parts", "given"),
    [
        sweep(lambda: tfdist.LocalSGDStrategy(sync_every=2), 2, PARTLY, id="local SGD"),
        pytest.param(tfdist.GossipStrategy, 2, PARTLY, id="gossip"),
        sweep(lambda: tfdist.AllReduceStrategy(delay=1), None, EQUAL, id="delay"),
    ],
)
def test_loss_decreases_under_other_strategies(make, parts, given):
    with make().scope():
        model = model_with(GradientNoise(SGD(0.05, gradient_accumulation_steps=parts), **given))
    losses = fit(model, epochs=20).history.history["loss"]
    assert losses[-1] < 0.5 * losses[0]


def test_updates_on_servers_raise(monkeypatch):
    monkeypatch.setattr(current_strategy, "of_strategy", lambda strategy, ability: ability is UpdatesOnServers or None)
    with pytest.raises(ValueError, match="which are on the servers"):
        applied(GradientNoise(SGD(0.05), **EQUAL))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GradientNoise("sgd", 2), TypeError, "takes a Keras 3 optimizer.*got 'sgd'"),
        (lambda: GradientNoise(keras.optimizers.LossScaleOptimizer(SGD()), 2), TypeError, "write LossScaleOptimizer"),
        (lambda: GradientNoise(GradientNoise(SGD(), 2), 2), TypeError, "is already a GradientNoise"),
        (lambda: GradientNoise(SGD(), 2, "full"), ValueError, "one of diagonal, trace, isotropic; got 'full'"),
        (lambda: GradientNoise(SGD(), 0.5), ValueError, r"GradientNoise\(ratio=…\) must be at least 1; got 0.5"),
        (lambda: GradientNoise(SGD()), ValueError, "must be at least 1; got None"),
        (lambda: GradientNoise(SGD(), 2, stddev=0.1), ValueError, "is for structure='isotropic'; got 0.1"),
        (lambda: GradientNoise(SGD(), structure="isotropic"), ValueError, "needs stddev=…"),
        (lambda: GradientNoise(SGD(), 2, "isotropic", 0.1), ValueError, "no ratio; got stddev=0.1 and ratio=2"),
        (lambda: applied(GradientNoise(SGD(), 2)), ValueError, "with gradient_accumulation_steps=… of at least 2"),
    ],
)
def test_invalid_arguments_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()
