import tests.devices  # noqa: F401
