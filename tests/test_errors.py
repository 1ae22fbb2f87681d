import inspect
import pickle

import pytest

import tfdist
from tfdist import errors
from tfdist.errors import TfdistError

ERRORS = {name: one for name, one in vars(errors).items() if inspect.isclass(one)}


@pytest.mark.parametrize("name", ERRORS)
def test_users_can_name_and_catch_it(name):
    assert getattr(tfdist, name) is ERRORS[name]
    assert name in tfdist.__all__
    with pytest.raises(TfdistError, match=r"^what was expected, what came, what to do$"):
        raise ERRORS[name]("what was expected, what came, what to do")


@pytest.mark.parametrize("name", ERRORS)
def test_it_says_when_it_is_raised(name):
    """In the documentation, where its name alone is listed."""
    assert ERRORS[name].__module__ == "tfdist.errors"
    assert ERRORS[name].__doc__
    assert ERRORS[name].__doc__ != TfdistError.__doc__ or name == "TfdistError"


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("TfdistError", RuntimeError),
        ("ClusterSpecError", ValueError),
        ("MPIUnavailableError", ImportError),
        ("TensorFlowMissingError", ImportError),
        ("CalibrationError", ValueError),
        ("CollectiveTimeoutError", TimeoutError),
        ("PayloadError", ValueError),
    ],
)
def test_code_that_knows_nothing_of_tfdist_can_catch_it(name, builtin):
    with pytest.raises(builtin):
        raise ERRORS[name]("text")


@pytest.mark.parametrize("name", ERRORS)
def test_it_reaches_another_process(name):
    """As from a data loader's or a tuner's worker."""
    found = pickle.loads(pickle.dumps(ERRORS[name]("text")))
    assert type(found) is ERRORS[name]
    assert str(found) == "text"


def test_none_is_caught_as_another_by_mistake():
    for name, one in ERRORS.items():
        caught = {other for other in ERRORS if issubclass(one, ERRORS[other])}
        assert caught == {name, "TfdistError"}
