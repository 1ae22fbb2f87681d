"""Communicators of every kind, of a rank that sends to itself."""

from tfdist.comm.group import GroupCommunicator
from tfdist.comm.local import LocalWorld


def local():
    return LocalWorld(1).communicator(0)


def of_group():
    """In a group of which it is another rank than in the world."""
    return GroupCommunicator(LocalWorld(3).communicator(2), (2,))


def over_mpi(lends=False):
    """Returns a communicator over MPI, which must be initialized.

    Args:
        lends: whether messages to itself are read in place, as between neighbours on one machine.
    """
    from mpi4py import MPI

    from tfdist.comm.mpi import MPICommunicator
    from tfdist.comm.shared import Arena, Neighbour

    arena = Arena() if lends else None
    neighbours = {0: Neighbour(arena.invitation())} if lends else {}
    return MPICommunicator(MPI.COMM_SELF.Dup(), arena, neighbours, [0])


def lending():
    return over_mpi(lends=True)


def finish(communicator, *requests):
    """Drives transfers to their end."""
    for _ in range(100_000):
        communicator.progress()
        if communicator.completed(requests):
            return
    raise AssertionError("a transfer does not complete")
