import pytest

from tfdist.parameter_server import Inverse, PerHost, SoftSync, Synchronous


def test_the_mean_over_the_workers_of_a_host_is_the_default():
    assert PerHost() == PerHost(SoftSync(1), roots=1)
    assert PerHost(Synchronous()).synchronization == Synchronous()


@pytest.mark.parametrize("roots", [0, True, 1.0])
def test_roots_that_cannot_be(roots):
    with pytest.raises(ValueError, match=r"PerHost\(roots=…\) must be a whole number of at least 1; got"):
        PerHost(roots=roots)


def test_a_mode_that_is_none():
    with pytest.raises(ValueError, match=r"must be a mode such as SoftSync\(\); got 2"):
        PerHost(2)


def test_what_late_gradients_are_worth_is_for_the_roots():
    with pytest.raises(
        ValueError, match=r"give late= to the strategy's synchronization=; got SoftSync\(late=Inverse\(\)\)"
    ):
        PerHost(SoftSync(late=Inverse()))
