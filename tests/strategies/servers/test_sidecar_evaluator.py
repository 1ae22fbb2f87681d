"""An evaluator beside a worker; the servers are threads of this process."""

import contextlib
import threading

import keras
import numpy as np
import pytest

import tfdist
from tests.strategies.served import Served, served
from tests.strategies.servers.trained import X, Y, fit, links, model_in
from tests.sweeps import sweep
from tfdist.errors import TfdistError
from tfdist.parameter_server import ElasticAveraging, Gradients, Hogwild, LocalSteps
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

DATA = X, Y


@contextlib.contextmanager
def beside(workers=1, **options):
    """The strategies of some workers, and that of an evaluator."""
    with served(workers, **options) as strategies:
        arguments = Arguments(pushes=options.get("pushes") or Gradients())
        evaluator = Served(strategies[0].servers, 7, arguments, observes=True)
        try:
            yield (*strategies, evaluator)
        finally:
            evaluator.extended._close()


def end(evaluator):
    evaluator.extended._end.over()


@pytest.mark.parametrize("pushes", [sweep(None), LocalSteps(2), sweep(ElasticAveraging(2)), sweep(Hogwild())])
def test_evaluator_reads_weights_trained_by_worker(pushes):
    with beside(servers=2, pushes=pushes) as (strategy, evaluator):
        model, copy = model_in(strategy), model_in(evaluator)
        for _ in range(2):
            fit(model, epochs=1)
            expected = model.evaluate(*DATA, verbose=0)
            assert copy.evaluate(*DATA, verbose=0) == pytest.approx(expected, rel=1e-5)
            np.testing.assert_allclose(copy.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-4, atol=1e-6)
        report = links(model)[0].report()
        assert [worker.number for worker in report.workers] == [0], "no server knows the evaluator"


def test_each_version_is_evaluated_once():
    """Until the job is over; then once more, if there is something newer."""
    with beside() as (strategy, evaluator):
        model, copy = (model_in(using, "adam", metrics=["mae"]) for using in (strategy, evaluator))
        fit(model, epochs=1)
        evaluations = threading.Semaphore(0)
        seen = keras.callbacks.LambdaCallback()
        seen.on_test_end = lambda logs=None: evaluations.release()
        results = []
        sidecar = tfdist.SidecarEvaluator(copy, DATA, callbacks=[seen], verbose=0)
        thread = threading.Thread(target=lambda: results.extend(sidecar.start()), daemon=True)
        thread.start()
        assert evaluations.acquire(timeout=60)
        fit(model, epochs=2)
        assert evaluations.acquire(timeout=60)
        end(evaluator)
        thread.join(60)
        assert not thread.is_alive()
        iterations = [result["iterations"] for result in results]
        assert iterations == sorted(set(iterations))
        assert (iterations[0], iterations[-1]) == (4, 12)
        assert results[-1]["loss"] == pytest.approx(model.evaluate(*DATA, verbose=0)[0], rel=1e-5)
        assert results[-1]["loss"] < results[0]["loss"]


def test_fit_evaluates_the_validation_data():
    with beside() as (strategy, evaluator):
        model, copy = (model_in(using, metrics=["mae"]) for using in (strategy, evaluator))
        fit(model, epochs=1)
        end(evaluator)
        history = fit(copy, validation_data=DATA)
        assert history.epoch == [4]
        assert set(history.history) == {"val_loss", "val_mae"}
        assert history.history["val_loss"][0] == pytest.approx(model.evaluate(*DATA, verbose=0)[0], rel=1e-5)
        with pytest.raises(TfdistError, match="does not train: give fit validation_data="):
            fit(copy)
        with pytest.raises(TfdistError, match="does not train: only workers make updates"):
            copy.train_on_batch(X, Y)


def test_non_trainable_weights_are_the_chiefs():
    def normalized(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    def statistics(model):
        return np.stack([model.layers[0].moving_mean.numpy(), model.layers[0].moving_variance.numpy()])

    with beside() as (strategy, evaluator):
        model, copy = normalized(strategy), normalized(evaluator)
        for _ in range(2):
            fit(model, epochs=2)
            expected = statistics(model)
            model.fit(X[:1], Y[:1], epochs=1, verbose=0)  # its beginning tells what the epochs before have left
            copy.evaluate(*DATA, verbose=0)
            np.testing.assert_array_equal(statistics(copy), expected)
            assert (statistics(model) != expected).all()


def test_invalid_evaluators_and_models_raise():
    with beside() as (strategy, evaluator):
        with pytest.raises(TfdistError, match="in an evaluator of a job with parameter servers"):
            tfdist.SidecarEvaluator(model_in(strategy), DATA)
        with pytest.raises(TfdistError, match="in an evaluator of a job with parameter servers"):
            tfdist.SidecarEvaluator(model_in(ParameterServerStrategy()), DATA)
        with evaluator.scope():
            model = keras.Sequential([keras.layers.Dense(2)])
            model.compile("adam", "mse")
        with pytest.raises(TfdistError, match="give it an Input"):
            model.evaluate(*DATA, verbose=0)
        for count in (0, -1, 2.0, True):
            with pytest.raises(
                ValueError, match=f"max_evaluations must be a whole number of at least 1, or None; got {count}"
            ):
                tfdist.SidecarEvaluator(model_in(evaluator), DATA, max_evaluations=count)
        end(evaluator)
        with pytest.raises(TfdistError, match="the job is over, and the parameter servers have no model"):
            model_in(evaluator).evaluate(*DATA, verbose=0)
