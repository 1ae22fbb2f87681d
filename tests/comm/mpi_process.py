"""A process in which MPI runs, alone; what it sends, it sends to itself."""

import concurrent.futures
import contextlib
import multiprocessing
import os

import pytest

from tfdist.comm import mpi_library, segments


def _begin(environment, initialize):
    os.environ.update(environment)
    if initialize:
        mpi_library.initialize_from_launcher(mpi_library.load())
        segments.unlink_own()  # the process ends without finalizing MPI


@contextlib.contextmanager
def mpi_process(environment=None, initialize=True):
    """Yields what calls a function of a module in the process; its results and errors come back."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, _begin, (environment or {}, initialize)) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(60)


@pytest.fixture(scope="module")
def mpi():
    """A process in which MPI is initialized."""
    with mpi_process() as call:
        yield call
