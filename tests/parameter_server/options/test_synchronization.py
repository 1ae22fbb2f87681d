import pytest

from tfdist.parameter_server.options.staleness import Inverse, Unscaled
from tfdist.parameter_server.options.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
    Synchronization,
    Synchronous,
)


@pytest.mark.parametrize(
    ("mode", "quorums"),
    [
        (Asynchronous(), [1, 1, 1]),
        (BoundedStaleness(3), [1, 1, 1]),
        (SoftSync(1), [1, 4, 9]),
        (SoftSync(2), [1, 2, 4]),
        (SoftSync(4), [1, 1, 2]),
        (SoftSync(100), [1, 1, 1]),
        (Synchronous(), [1, 4, 9]),
        (Synchronous(backup_workers=1), [1, 3, 8]),
        (Synchronous(backup_workers=5), [1, 1, 4]),
    ],
)
def test_quorum_depends_on_mode_and_workers(mode, quorums):
    assert [mode.quorum(members) for members in (1, 4, 9)] == quorums


@pytest.mark.parametrize(
    "make",
    [
        lambda: BoundedStaleness(-1),
        lambda: BoundedStaleness(1.5),
        lambda: SoftSync(0),
        lambda: SoftSync(True),
        lambda: Synchronous(backup_workers=-1),
        lambda: Synchronous("2"),
    ],
)
def test_invalid_numbers_raise(make):
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        make()


@pytest.mark.parametrize("kind", [Asynchronous, SoftSync])
@pytest.mark.parametrize("late", [0.5, Inverse, None])
def test_late_gradients_need_a_policy(kind, late):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(late=…\) must be a policy such as Inverse\(\)"):
        kind(late=late)


class OfOnesOwn(Synchronization):
    """A mode of a user's."""


def test_late_gradients_are_unscaled_by_default():
    modes = Asynchronous(), BoundedStaleness(2), SoftSync(), Synchronous(), OfOnesOwn()
    assert {mode.late for mode in modes} == {Unscaled()}
    assert BoundedStaleness(2, Inverse()).late == Inverse()


def test_repr_contains_given_arguments_only():
    assert [repr(mode) for mode in (Asynchronous(), SoftSync(2, Inverse()))] == [
        "Asynchronous()",
        "SoftSync(n=2, late=Inverse())",
    ]
