import collections
import functools

import pytest

from tests.multiprocess import harness


@pytest.fixture(scope="module")
def passes(request, tmp_path_factory):
    """Asserts that a check of the module's ``PROGRAM`` passes on a number of processes; for each check, a test.

    One launch runs all checks that are selected for a number of processes, as TensorFlow takes seconds to import. The
    program runs those that ``TEST_CASES`` names, in turn, and prints ``PASSED name`` after each, with what must be
    equal on all ranks behind it. Tests that use this have the parameters ``size`` and ``check``; see `checks`.
    """
    asked = collections.defaultdict(list)
    for item in request.session.items:
        if item.module is request.module and "passes" in item.fixturenames:
            asked[item.callspec.params["size"]].append(item.callspec.params["check"])

    @functools.cache
    def launched(size):
        folder = str(tmp_path_factory.mktemp("checks"))
        settings = {"TEST_CASES": ",".join(asked[size])}
        with harness.started([request.module.PROGRAM, folder], size, settings) as processes:
            try:
                failed = [end.code for end in processes.wait()] != [0] * size
            except AssertionError as error:
                return processes, str(error)
        harness.assert_nothing_left()
        return processes, processes.outputs() if failed else ""

    def passes(size, check):
        processes, error = launched(size)
        passed = [passed_in(processes.output(rank)) for rank in range(size)]
        missing = [name for name in asked[size] if not all(name in results for results in passed)]
        if check in missing[:1] or (error and not missing):
            pytest.fail(error or f"{check} has not run\n{processes.outputs()}", pytrace=False)
        if check in missing:
            pytest.fail(f"not reached, as {missing[0]} failed in the same launch", pytrace=False)
        assert len({results[check] for results in passed}) == 1, [results[check] for results in passed]

    return passes


def selected(request, test, parameter="name"):
    """The values of a parameter for which a test of the module is selected, for fixtures that one launch serves."""
    items = [item for item in request.session.items if item.module is request.module and item.originalname == test]
    return [item.callspec.params[parameter] for item in items]


def passed_in(output):
    """What is written behind the names of the checks that have passed, by name."""
    lines = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith("PASSED ")]
    return {name: "".join(rest) for _, name, *rest in lines}


def checks(of_sizes):
    """Parametrizes a test by the numbers of processes and the checks of each.

    Args:
        of_sizes: checks, as names or `pytest.param`, by number of processes.
    """
    cases = []
    for size, names in of_sizes.items():
        for name in names:
            name, marks = (name, ()) if isinstance(name, str) else (name.values[0], name.marks)
            cases.append(pytest.param(size, name, marks=marks, id=f"{name}-{size}"))
    return pytest.mark.parametrize(("size", "check"), cases)
