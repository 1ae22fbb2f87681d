"""An optimizer that adds the noise of small batches to the gradients of large ones, around another optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.optimizers.gradient_parts import GradientParts, dtype_of_sums
from tfdist.optimizers.keras_optimizers import gradients_of
from tfdist.private.optimizers import accumulated_by, place_of, strategy_of
from tfdist.strategies import current_strategy
from tfdist.strategies.divided import described_variables
from tfdist.strategies.divided_abilities import DealsVariables
from tfdist.strategies.keras import keras_noise
from tfdist.strategies.server_abilities import UpdatesOnServers

STRUCTURES = ("diagonal", "trace", "isotropic")


@keras.saving.register_keras_serializable("tfdist")
class GradientNoise(keras.optimizers.Optimizer):
    """Adds noise to the gradients of large batches, with the variance that gradients of smaller batches have.

    The large batch comes in k parts at the same weights, whose gradients the inner optimizer accumulates. From them
    follows the variance v of a part's gradient. The variance of their mean is v/k; for a batch ``ratio`` times smaller
    it is ratio · v/k. Normal noise with the difference, (ratio − 1) · v/k, is added::

        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=8)
        model.compile(tfdist.optimizers.GradientNoise(inner, ratio=32), loss)
        model.fit(x, y, batch_size=512)  # updates with 4096 samples, and the noise of 128

    Noise comes after the accumulation and before the inner optimizer clips gradients. With several processes, each one
    measures the variance of its own parts, and adds its own noise before gradients are summed: the sum's variance is
    the sum of the variances, nothing more is sent, and weights stay equal. "Isotropic" noise is the same on all
    processes, and is added to the sum. Sparse gradients become dense.

    The optimizer goes inside `keras.optimizers.LossScaleOptimizer`, and around or inside of
    `tfdist.DistributedOptimizer` and `keras.optimizers.MultiOptimizer`. Under strategies in which processes train on
    their own for some steps, such as `tfdist.LocalSGDStrategy`, the batch is that of one process.

    Args:
        inner_optimizer: a Keras optimizer, with ``gradient_accumulation_steps`` unless the noise is "isotropic". It has
            its own clipping, weight decay and schedules.
        ratio: size of the batch, relative to that of the batch to imitate; at least 1. With 1 there is no noise.
        structure: "diagonal": each weight has its own v. "trace": all weights of an optimizer have the mean of v.
            "isotropic": the noise has the given ``stddev``; nothing is measured, and there is no ``ratio``.
        stddev: standard deviation of "isotropic" noise.
        seed: seed of the noise; the same on all processes.
        name: name of the optimizer.

    Raises:
        TypeError: ``inner_optimizer`` is not a Keras 3 optimizer, scales losses, or adds noise already.
        ValueError: an argument is out of its range; or at the first step, gradients are not accumulated, or the
            strategy is `tfdist.ParameterServerStrategy`.

    References:
        Wen, Luk, Gazeau, Zhang, Chan and Ba, An empirical study of large-batch stochastic gradient descent with
        structured covariance noise, 2019. There the variance is that of the Fisher matrix.
    """

    built: bool

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        ratio: float | None = None,
        structure: str = "diagonal",
        stddev: float | None = None,
        seed: int = 0,
        name: str = "gradient_noise",
    ) -> None:
        _check(inner_optimizer, ratio, structure, stddev)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.ratio = ratio
        self.structure = structure
        self.stddev = stddev
        self.seed = seed

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the inner optimizer's variables, and those for sums of squared deviations."""
        if self.built:
            return
        if current_strategy.of_strategy(strategy_of(self), UpdatesOnServers) is not None:
            raise ValueError(
                "GradientNoise adds noise to the gradients of an update, which are on the servers under "
                "ParameterServerStrategy: compile the model with the inner optimizer alone"
            )
        measures = self.structure != "isotropic"
        if measures and current_strategy.of_strategy(strategy_of(self), DealsVariables) is not None:
            raise ValueError(
                f"{self.name}: AllReduceStrategy(shard='optimizer') sums gradients before they are accumulated, so a "
                "process has no gradients of its own of which to measure the variance; use structure='isotropic', or "
                "leave out shard="
            )
        self.inner_optimizer.build(variables)
        super().build(variables)
        # Variables under this name of Keras may differ between processes.
        self._accumulated_gradients: list[Any] = []
        applying = getattr(self.inner_optimizer, "optimizers", None) or [self.inner_optimizer]
        if self.structure == "isotropic":
            keras_noise.install()
            for optimizer in applying:
                keras_noise.attach(optimizer, functools.partial(self._with_equal_noise, optimizer))
        elif self.ratio != 1:
            for optimizer in applying:
                _check_accumulation(optimizer)
                GradientParts(optimizer, self._sum_of, functools.partial(self._with_own_noise, optimizer))
            self._accumulated_gradients = [self._new_sum(variable) for variable in variables]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Applies gradients by the inner optimizer, which adds noise."""
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables or ()))
            self.built = True
        self.inner_optimizer.apply(grads, trainable_variables)

    @property
    def variables(self) -> list[Any]:
        """This optimizer's variables, and those of the inner optimizer."""
        return self._variables + self.inner_optimizer.variables

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of updates."""
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self) -> float | None:
        """The inner optimizer's factor by which losses are scaled."""
        inner = getattr(self, "inner_optimizer", None)
        return None if inner is None else inner.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        if hasattr(self, "inner_optimizer"):
            self.inner_optimizer.loss_scale_factor = factor

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Sets the variables' final values, as the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration, which contains that of the inner optimizer."""
        names = ("name", "ratio", "structure", "stddev", "seed")
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"inner_optimizer": inner, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> GradientNoise:
        """Makes the optimizer and its inner optimizer from a configuration."""
        rest = dict(config)
        inner = keras.saving.deserialize_keras_object(rest.pop("inner_optimizer"), custom_objects=custom_objects)
        return cls(inner, **rest)

    def _new_sum(self, variable: Any) -> Any:
        shape = variable.shape if self.structure == "diagonal" else ()
        path = (getattr(variable, "path", None) or variable.name).replace("/", "_").replace(":", "_")
        return self.add_variable(shape, dtype=dtype_of_sums(variable).name, name=f"{path}_squared_deviations")

    def _sum_of(self, variable: Any) -> Any:
        return accumulated_by(self)[place_of(self, variable)]

    def _with_equal_noise(self, optimizer: Any, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds noise to sums of gradients, the same on all replicas."""
        noisy = []
        for gradient, variable in zip(gradients, variables, strict=True):
            dense = tf.convert_to_tensor(gradient)
            noise = self.stddev * self._normal(optimizer, variable, 0)
            noisy.append(dense + tf.cast(noise, dense.dtype))
        return noisy

    def _with_own_noise(
        self, optimizer: Any, gradients: list[Any], variables: Sequence[Any], squares: list[tf.Tensor]
    ) -> list[Any]:
        """Adds a replica's own noise to its mean gradients, by the squared deviations of their parts."""
        steps, further = optimizer.gradient_accumulation_steps, (self.ratio or 1) - 1
        if self.structure == "trace":
            trace = tf.add_n([tf.cast(tensor, tf.float64) for tensor in squares])
            each = trace / sum(math.prod(tensor.shape) for tensor in variables)
            squares = [tf.cast(each, tensor.dtype) for tensor in squares]
        noisy = []
        for gradient, variable, square in zip(gradients, variables, squares, strict=True):
            deviation = tf.sqrt(square * (further / (steps * (steps - 1))))
            noise = deviation * self._normal(optimizer, variable, _rank(optimizer))
            noisy.append(gradient + tf.cast(noise, gradient.dtype))
        return noisy

    def _normal(self, optimizer: Any, variable: Any, rank: Any) -> tf.Tensor:
        """Draws normal random numbers for a variable, an update and a rank; for a part, those of the whole variable."""
        seed = tf.constant([self.seed, place_of(self, variable)], tf.int64)
        for part in (optimizer.iterations, rank):
            seed = tf.random.experimental.stateless_fold_in(seed, tf.cast(part, tf.int64))
        shape, part = described_variables.whole_of(variable)
        noise = tf.random.stateless_normal(shape, seed, dtype=dtype_of_sums(variable), alg="philox")
        return noise if part is None else noise[part]


def _rank(optimizer: Any) -> Any:
    """Returns the rank of the calling replica or process; different for all whose gradients are summed."""
    averaging = gradients_of(optimizer)
    if averaging is not None:
        return averaging.group.rank
    replica = tf.distribute.get_replica_context()
    return 0 if replica is None else replica.replica_id_in_sync_group


def _check(optimizer: Any, ratio: float | None, structure: str, stddev: float | None) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"GradientNoise takes a Keras 3 optimizer, such as keras.optimizers.SGD(0.1); got {optimizer!r}. Make "
            "one from its name with keras.optimizers.get(name)."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "GradientNoise adds noise to gradients after the loss scale is taken out of them: write "
            "LossScaleOptimizer(GradientNoise(optimizer, …)) instead of GradientNoise(LossScaleOptimizer(optimizer), …)"
        )
    if isinstance(optimizer, GradientNoise):
        raise TypeError("GradientNoise takes an optimizer without noise; got one that is already a GradientNoise")
    if structure not in STRUCTURES:
        raise ValueError(f"GradientNoise(structure=…) must be one of {', '.join(STRUCTURES)}; got {structure!r}")
    if structure == "isotropic":
        if ratio is not None or stddev is None or not stddev >= 0:
            raise ValueError(
                "GradientNoise(structure='isotropic') needs stddev=… of at least 0, and takes no ratio; got "
                f"stddev={stddev} and ratio={ratio}"
            )
    elif stddev is not None:
        raise ValueError(f"GradientNoise(stddev=…) is for structure='isotropic'; got {stddev} for {structure!r}")
    elif ratio is None or not ratio >= 1:
        raise ValueError(f"GradientNoise(ratio=…) must be at least 1; got {ratio}")


def _check_accumulation(optimizer: Any) -> None:
    if not optimizer.gradient_accumulation_steps:
        raise ValueError(
            "GradientNoise measures the variance between gradients that are accumulated, but its inner optimizer "
            f"{optimizer.name} accumulates none: make that optimizer with gradient_accumulation_steps=… of at least 2, "
            "and divide the batch_size of fit by the same number"
        )
