import pytest

from tfdist.parameter_server import Inverse, PerHost, SoftSync, Synchronous


def test_softsync_with_one_root_is_the_default():
    assert PerHost() == PerHost(SoftSync(1), roots=1)
    assert PerHost(Synchronous()).synchronization == Synchronous()


@pytest.mark.parametrize("roots", [0, True, 1.0])
def test_invalid_number_of_roots_raises(roots):
    with pytest.raises(ValueError, match=r"PerHost\(roots=…\) must be a whole number of at least 1; got"):
        PerHost(roots=roots)


def test_invalid_mode_raises():
    with pytest.raises(ValueError, match=r"must be a mode such as SoftSync\(\); got 2"):
        PerHost(2)


def test_staleness_policy_within_a_host_raises():
    with pytest.raises(
        ValueError, match=r"give late= to the strategy's synchronization=; got SoftSync\(late=Inverse\(\)\)"
    ):
        PerHost(SoftSync(late=Inverse()))
