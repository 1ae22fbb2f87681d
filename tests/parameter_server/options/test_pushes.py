import pytest

from tfdist.parameter_server import ElasticAveraging, LocalSteps


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
def test_wrong_numbers(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def test_defaults():
    assert LocalSteps() == LocalSteps(steps=1)
    assert ElasticAveraging() == ElasticAveraging(steps=10, rate=None)
