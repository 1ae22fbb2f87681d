import inspect
import pickle

import pytest

import tfdist
from tfdist import errors
from tfdist.errors import TfdistError

ERRORS = {name: member for name, member in vars(errors).items() if inspect.isclass(member)}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_public_and_catchable_as_tfdist_error(name):
    assert getattr(tfdist, name) is ERRORS[name]
    assert name in tfdist.__all__
    with pytest.raises(TfdistError, match=r"^what was expected, what came, what to do$"):
        raise ERRORS[name]("what was expected, what came, what to do")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_docstrings_of_their_own(name):
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
def test_errors_are_catchable_as_builtin_exceptions(name, builtin):
    with pytest.raises(builtin):
        raise ERRORS[name]("text")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_can_be_pickled(name):
    """As from a data loader's or a tuner's worker."""
    unpickled = pickle.loads(pickle.dumps(ERRORS[name]("text")))
    assert type(unpickled) is ERRORS[name]
    assert str(unpickled) == "text"


def test_errors_inherit_only_from_tfdist_error():
    for name, error in ERRORS.items():
        caught = {other for other in ERRORS if issubclass(error, ERRORS[other])}
        assert caught == {name, "TfdistError"}
