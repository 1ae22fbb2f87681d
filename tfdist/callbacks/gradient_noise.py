"""Callbacks that measure how noisy gradients are, and tell how large a batch is worthwhile."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdist.callbacks.processes import has_others
from tfdist.callbacks.summaries import Summaries
from tfdist.notices import notice
from tfdist.optimizers.gradients import GradientAverager
from tfdist.optimizers.keras_optimizers import gradients_of
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import Ability, DataParallel, DelaysUpdates
from tfdist.strategies.divided_abilities import DealsVariables
from tfdist.strategies.keras.gradient_norms import GradientNorms, Noise
from tfdist.strategies.keras.keras_optimizers import innermost


class _GradientStatistics(keras.callbacks.Callback):
    """Base of callbacks that measure the noise of each epoch's gradients; subclasses compute a figure from it."""

    _name: str

    def __init__(self, batch_size: int | None = None, log_dir: str | None = None) -> None:
        super().__init__()
        is_number = isinstance(batch_size, int) and not isinstance(batch_size, bool)
        if batch_size is not None and (not is_number or batch_size < 1):
            raise ValueError(
                f"{type(self).__name__}(batch_size=…) must be a number of samples, at least 1; got {batch_size!r}"
            )
        self._batch_size = batch_size
        self._summaries = Summaries(log_dir)
        self._at: DataParallel | GradientAverager | None = None
        self._norms: GradientNorms | None = None
        self._before = Noise()
        self.history: dict[str, list[float]] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to measure gradients.

        Raises:
            ValueError: gradients are not summed in each step, or are changed before the sum.
        """
        self._at = self._measured()
        if self._at is None:
            return
        if self._at.norms is None:
            self._at.norms = GradientNorms()
            self.model.make_train_function(force=True)
        self._norms = self._at.norms

    def _measured(self) -> DataParallel | GradientAverager | None:
        """Returns the object that sums gradients; None if one replica trains alone."""
        name = type(self).__name__
        optimizer = innermost(self.model.optimizer)
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise ValueError(f"{name} measures the gradients of single steps: leave out gradient_accumulation_steps")
        gradients = gradients_of(optimizer)
        if gradients is not None:
            if not has_others(self):
                return None
            if not gradients.averages:
                raise ValueError(
                    f"{name} needs gradients that are averaged unchanged: leave out op=, average=, compression= and "
                    "local_clip_…="
                )
            if self._batch_size is None:
                raise ValueError(
                    f"without a strategy, {name} needs batch_size=…, the number of a process's samples in a step"
                )
            gradients.samples = self._batch_size
            return gradients
        extended = current_strategy.of_model(self.model, DataParallel)
        if extended is None or not extended.has_several_replicas:
            has_others(self)
            return None
        lacks_sums = isinstance(extended, (DelaysUpdates, DealsVariables))
        if not extended.synchronizes_steps or extended.compressor is not None or lacks_sums:
            raise ValueError(
                f"{name} needs a strategy that sums gradients in each step on all processes, without compression, "
                "delay and shard=…"
            )
        return extended

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes the reading from which the epoch's figures are counted."""
        if self._norms is not None:
            self._before = self._norms.read()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Computes the figures of the epoch, and reports them."""
        if self._norms is None:
            return
        noise = self._norms.read().since(self._before)
        if not noise.steps:
            return
        ratio = noise.variance / noise.signal if noise.signal > 0 else math.inf
        reported = self._figure(max(0.0, ratio))
        figures = {
            self._name: reported,
            "gradient_variance": noise.variance / noise.steps,
            "gradient_signal": noise.signal / noise.steps,
        }
        for name, figure in figures.items():
            self.history.setdefault(name, []).append(figure)
        if logs is not None:
            logs[self._name] = reported
        writes = current_strategy.of_model(self.model, Ability)
        gradients = gradients_of(self.model.optimizer)
        if writes.is_writer if writes is not None else gradients is None or gradients.group.is_writer:
            if math.isinf(reported):
                notice(
                    "tfdist: epoch %d: the gradient is too small to measure in its noise; any batch size pays off.",
                    epoch + 1,
                )
            else:
                notice(f"tfdist: epoch %d: {self._advice}", epoch + 1, reported)
            self._summaries.write(epoch, {f"gradients/{name}": figure for name, figure in figures.items()}, {})

    _advice: str

    def _figure(self, ratio: float) -> float:
        """Returns the figure that is reported.

        Args:
            ratio: S / ‖g‖² of single samples' gradients, at least 0.
        """
        raise NotImplementedError

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops measuring, and closes TensorBoard's file."""
        self._summaries.close()
        if self._at is not None and self._at.norms is not None:
            self._at.norms = None
            self.model.train_function = None  # the next `fit` makes one that does not measure
        self._at = self._norms = None


class GradientNoiseScale(_GradientStatistics):
    """Measures the noise scale of gradients: the batch size beyond which larger batches gain less and less.

    The scale is B = S / ‖g‖², with the mean g of single samples' gradients and their variance S, summed over all
    weights. Far below it, twice the batch halves the number of steps; far above, it saves next to nothing. The scale
    usually grows during training. It is computed from the norms of the replicas' gradients and of their sum, so it
    needs two or more replicas, and no further messages. As the estimate is noisy, it is averaged over the steps of each
    epoch.

    The chief reports the scale, and ``logs`` contain ``gradient_noise_scale`` for later callbacks. There is no report
    if one replica trains alone, or if no step of the epoch could be measured.

    Args:
        batch_size: number of samples of each process in a step, for training without a strategy, that is with
            `tfdist.DistributedOptimizer`.
        log_dir: TensorBoard's log directory; by default nothing is written.

    Attributes:
        history: figures of every epoch by name, on every process: ``gradient_noise_scale``, in samples; and
            ``gradient_variance`` and ``gradient_signal``, S and ‖g‖².

    Raises:
        ValueError: when training begins, gradients are not summed in each step, or are changed before the sum.

    References:
        McCandlish, Kaplan, Amodei et al., *An empirical model of large-batch training*, 2018.
    """

    _name = "gradient_noise_scale"
    _advice = "the gradient noise scale is %.3g samples; larger batches pay little."

    def _figure(self, ratio: float) -> float:
        return ratio


class GradientDiversity(_GradientStatistics):
    """Measures the diversity of gradients: the batch size up to which each sample is worth as much as alone.

    The gradient diversity of n samples is Σ_i ‖g_i‖² / ‖Σ_i g_i‖²; n times that is a batch size. While the batch is
    well below it, each sample in mini-batch SGD is worth as much as in steps with single samples. It is estimated as in
    `GradientNoiseScale`, for all samples that the data's distribution may yield: 1 + S / ‖g‖².

    Args:
        batch_size: number of samples of each process in a step, for training without a strategy.
        log_dir: TensorBoard's log directory; by default nothing is written.

    Attributes:
        history: figures of every epoch by name, on every process: ``gradient_diversity``, in samples; and
            ``gradient_variance`` and ``gradient_signal``, S and ‖g‖².

    Raises:
        ValueError: when training begins, gradients are not summed in each step, or are changed before the sum.

    References:
        Yin, Pananjady, Lam, Papailiopoulos, Ramchandran and Bartlett, *Gradient diversity: a key ingredient for
        scalable distributed learning*, AISTATS 2018.
    """

    _name = "gradient_diversity"
    _advice = "gradient diversity allows for batches of %.3g samples."

    def _figure(self, ratio: float) -> float:
        return 1 + ratio
