import pytest

from tests.quorum.jobs import Job


@pytest.fixture
def job():
    """Makes a `Job`, and closes it at the end."""
    made = []

    def make(*arguments, **options):
        made.append(Job(*arguments, **options))
        return made[-1]

    yield make
    for instance in made:
        instance.close()
