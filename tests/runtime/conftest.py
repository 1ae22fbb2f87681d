from tests.runtime.jobs import fresh  # noqa: F401
