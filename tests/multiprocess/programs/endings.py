"""How processes end, and what the others see of it; TEST_CASE names one way."""

import atexit
import os
import sys
import threading

import numpy as np

from tfdist.cluster import discovery, messages
from tfdist.cluster.settings import Timeouts
from tfdist.comm import mpi_library
from tfdist.engine import operations
from tfdist.errors import TfdistError
from tfdist.runtime import world

atexit.register(lambda: print("OTHER EXIT HANDLER", flush=True))
entered = world.enter(discovery.discover(None), Timeouts.from_environment())
engine, rank, size = entered.engine, entered.rank, entered.size


def sum_of_ones(key, members=None):
    total = np.ones(4)
    engine.run(key, operations.all_reduce(total, "ring"), members=members)
    return total[0]


def new_key_after_an_end():
    """Rank 0 has ended its script when rank 1 begins something new."""
    if rank == 1:
        while 0 not in engine.control.departed:
            threading.Event().wait(0.01)
        try:
            sum_of_ones("new")
        except TfdistError as error:
            print("GOT", error, flush=True)


def caught_failure():
    """Rank 1 fails by itself in a collective, and catches that."""

    def failing(comm, tag):
        yield ()
        raise MemoryError("no more")

    sum_of_ones("known")
    try:
        if rank == 1:
            engine.run("known", failing)
        else:
            sum_of_ones("known")
    except (TfdistError, MemoryError) as error:
        print("GOT", type(error).__name__, error, flush=True)
    sys.exit(3)


def new_key_while_one_joins():
    """Rank 1 has joined when the others are agreeing on a new key, and while they are."""
    if rank == 1:
        engine.join()
    else:
        for number in range(20):
            assert sum_of_ones(f"new {number}") == size - 1
        engine.join()
    print("DONE", flush=True)


def group_of_some():
    """In a group of ranks 1 and 2, rank 2 has joined; rank 0, which is no member, has not."""
    if rank == 2:
        engine.join()
    elif rank == 1:
        while 2 not in engine.control.joined:
            threading.Event().wait(0.01)
        assert sum_of_ones("in a group", members=(1, 2)) == 1
        engine.control.publish("rank 1 is through", "yes")
        engine.join()
    else:
        assert engine.control.look_up("rank 1 is through") == "yes"
        engine.join()
    print("DONE", flush=True)


def thread_that_stays():
    """Rank 1's script fails while a thread of its own keeps its process from ending."""
    if rank == 1:
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("a mistake")
    try:
        sum_of_ones("known")
    except TfdistError as error:
        print("GOT", error, flush=True)


def forked_child():
    """A child that rank 1 forks ends in the ordinary way; another lives on. Neither counts as the rank."""
    if rank == 1:
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
    assert sum_of_ones("known") == size
    if rank == 1:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                threading.Event().wait(0.01)
            threading.Event().wait(5)
            os._exit(0)
        os.kill(parent, 9)
    try:
        sum_of_ones("known")
    except TfdistError as error:
        print("GOT", error, flush=True)


def killed_at_the_end():
    """Rank 1 is killed when rank 0's script has ended already."""
    assert sum_of_ones("known") == size
    if rank == 1:
        while 0 not in engine.control.departed:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), 9)
    print("SCRIPT ENDED", flush=True)


def killed_before_the_end():
    """Rank 1 is killed after its last collective, and rank 0's script ends without another one."""
    assert sum_of_ones("known") == size
    if rank == 1:
        os.kill(os.getpid(), 9)
    while engine.control.failure is None:
        threading.Event().wait(0.01)
    print("SCRIPT ENDED", flush=True)


def killed_in_finalize(victim):
    assert sum_of_ones("known") == size
    if rank == victim:
        mpi_library.finalize = lambda module: os.kill(os.getpid(), 9)


def killed_in_finalize_0():
    """Rank 0, in whose process the server was started, is killed as MPI_Finalize begins."""
    killed_in_finalize(0)


def killed_in_finalize_1():
    """Rank 1 is killed as MPI_Finalize begins, where rank 0 waits for it."""
    killed_in_finalize(1)


def broken_line():
    """What comes to rank 1 from the server is damaged."""
    assert sum_of_ones("known") == size
    if rank == 1:
        engine.control._channel._receive = lambda message: messages.from_server(b'{"type": "fai')
    while engine.control.failure is None:
        threading.Event().wait(0.01)
    try:
        if rank == 0:
            raise engine.control.failure  # and no part in what rank 1 waits for
        sum_of_ones("known")
    except TfdistError as error:
        print("GOT", type(error).__name__, error, flush=True)


globals()[os.environ["TEST_CASE"]]()
