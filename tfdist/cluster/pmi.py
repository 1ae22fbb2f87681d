"""A process manager for MPICH in the same process: gives `MPI_Init` the answers that `mpiexec` would give.

MPICH speaks the PMI-1 text protocol over the connected socket in ``PMI_FD``. A thread serves the other end. It passes
shared data (business cards, barriers) on over the task's connection to the rendezvous server. So MPI never sees that
connection, nor its end: when the server or a peer is gone, this process reports it, and MPICH does not crash.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Sequence

from tfdist.cluster import messages
from tfdist.cluster.control import Control
from tfdist.errors import MPIUnavailableError, TfdistError


class ProcessManager:
    """The process manager of one process's MPI library.

    Args:
        control: this task's membership, over which it reaches all tasks.
        size: number of processes in MPI's world.
        nodes: number of each rank's group of processes that may use shared memory, by rank; None lets MPI decide by
            hostnames.

    Attributes:
        fd: file descriptor to put into ``PMI_FD``. MPI owns and closes it.
    """

    def __init__(self, control: Control, size: int, nodes: Sequence[int] | None) -> None:
        self._control = control
        self._size = size
        self._mapping = None if nodes is None else mapping_of(nodes)
        self._barriers = itertools.count()
        self._ours, theirs = socket.socketpair()
        self.fd = theirs.detach()
        threading.Thread(target=self._serve, name="tfdist-pmi", daemon=True).start()

    def _serve(self) -> None:
        lines = self._ours.makefile("r", newline="\n")
        try:
            for line in lines:
                self._ours.sendall(self._answer(dict(part.split("=", 1) for part in line.split())).encode() + b"\n")
        except (OSError, TfdistError):
            pass  # MPI waits in vain for an answer; the watcher of the control connection ends the process
        except Exception as error:
            self._control.fail(
                MPIUnavailableError(f"tfdist could not answer a request of MPI: {type(error).__name__}: {error}")
            )

    def _answer(self, message: dict[str, str]) -> str:
        command = message["cmd"]
        if command == "init":
            return "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
        if command == "get_maxes":
            longest = max(1024, len(self._mapping or "") + 1)
            return f"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max={longest}"
        if command == "get_appnum":
            return "cmd=appnum rc=0 appnum=0"
        if command == "get_my_kvsname":
            return f"cmd=my_kvsname rc=0 kvsname={self._control.job}"
        if command == "get_universe_size":
            return f"cmd=universe_size rc=0 size={self._size}"
        if command == "put":
            self._control.publish(message["key"], message["value"])
            return "cmd=put_result rc=0 msg=success"
        if command == "get" and message["key"] == "PMI_process_mapping" and self._mapping:
            return f"cmd=get_result rc=0 msg=success value={self._mapping}"
        if command == "get":
            value = self._control.request(lambda number: messages.GetValue(number, message["key"], wait=False))
            if value is None:
                return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            return f"cmd=get_result rc=0 msg=success value={value}"
        if command == "barrier_in":
            self._control.barrier(f"pmi {next(self._barriers)}", range(self._size))
            return "cmd=barrier_out rc=0"
        if command == "finalize":
            return "cmd=finalize_ack rc=0"
        raise ValueError(f"unknown PMI command {command}")

    def release(self) -> None:
        """Answers MPICH's last request in advance.

        MPICH's exit handler talks to the process manager when Python and the serving thread are gone already. The
        answer waits in the socket, which the kernel keeps until the process has ended.
        """
        try:
            self._ours.sendall(b"cmd=finalize_ack rc=0\n")
            self._ours.detach()
        except OSError:
            pass


def mapping_of(nodes: Sequence[int]) -> str:
    """Returns PMI's notation for the node of each process.

    A block (n, k, p) stands for k nodes from node n on, with p processes each.
    """
    blocks: list[list[int]] = []
    for node, members in itertools.groupby(nodes):
        count = len(list(members))
        if blocks and blocks[-1][2] == count and blocks[-1][0] + blocks[-1][1] == node:
            blocks[-1][1] += 1
        else:
            blocks.append([node, 1, count])
    return f"(vector,{','.join('({},{},{})'.format(*block) for block in blocks)})"
