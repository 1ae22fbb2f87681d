from tests.comm.mpi_process import mpi  # noqa: F401  (a fixture)
