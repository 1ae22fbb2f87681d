import pytest

from tfdist.compression import DeepGradientCompression, Int8, WithoutFeedback
from tfdist.compression.policy import as_policy
from tfdist.parameter_server import ElasticAveraging, Gradients, LocalSteps
from tfdist.parameter_server.options.pushes import policy_of


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalSteps(0),
        lambda: LocalSteps(2.0),
        lambda: LocalSteps(True),
        lambda: ElasticAveraging(steps=0),
        lambda: ElasticAveraging(rate=0),
        lambda: ElasticAveraging(rate=1.5),
    ],
)
def test_invalid_numbers_raise(make):
    with pytest.raises(ValueError, match="must be"):
        make()


@pytest.mark.parametrize("prefetch", [2, -1, True])
def test_invalid_prefetch_raises(prefetch):
    with pytest.raises(ValueError, match=r"Gradients\(prefetch=…\) must be 0 or 1; got"):
        Gradients(prefetch=prefetch)


def test_invalid_sparse_updates_raise():
    with pytest.raises(ValueError, match='must be "exact" or "lazy"; got \'row\''):
        Gradients(sparse="row")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gradients(compression="int8"),
        lambda: Gradients(parameters=Int8),
        lambda: LocalSteps(2, 0.5),
        lambda: ElasticAveraging(compression="int8"),
    ],
)
def test_invalid_compression_raises(make):
    with pytest.raises(TypeError, match="compression must be"):
        make()


@pytest.mark.parametrize("method", [WithoutFeedback(Int8()), DeepGradientCompression(0.1)], ids=str)
def test_parameters_need_methods_for_differences(method):
    Gradients(compression=WithoutFeedback(Int8()))
    with pytest.raises(ValueError, match=r"Gradients\(parameters=…\) cannot compress with"):
        Gradients(parameters=method)


def test_compression_is_converted_to_a_policy():
    assert policy_of(None) is None
    assert repr(policy_of(Int8())) == repr(as_policy(Int8()))
    assert policy_of(chosen := as_policy(Int8())) is chosen


def test_defaults():
    assert Gradients() == Gradients(None, None, 0, "exact")
    assert LocalSteps() == LocalSteps(steps=1)
    assert ElasticAveraging() == ElasticAveraging(steps=10, rate=None)
