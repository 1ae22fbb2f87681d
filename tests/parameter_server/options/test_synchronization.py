import pytest

from tfdist.parameter_server.options.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
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
def test_how_many_gradients_make_an_update(mode, quorums):
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
def test_wrong_numbers(make):
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        make()
