import pytest

from tests.strategies.ranked import Ranked


@pytest.fixture
def strategy(ranks):
    """The strategy of a rank alone."""
    return Ranked(ranks(1).groups[0])
