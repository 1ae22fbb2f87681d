"""Messages between ranks before the rendezvous; no module of tfdist pickles."""

import ast
from pathlib import Path

import numpy as np
import pytest

import tfdist
from tfdist.comm import messages


class OneOfTwo:
    """An MPI communicator as it is seen from rank 1 of two."""

    def __init__(self, arrives):
        self.arrives = arrives

    def Get_rank(self):
        return 1

    def Get_size(self):
        return 2

    def Bcast(self, buffer):
        buffer[: len(self.arrives)] = np.frombuffer(self.arrives, np.uint8)

    def Allgather(self, message, everyone):
        everyone[1] = message
        everyone[0] = np.frombuffer(self.arrives, np.uint8) if self.arrives else message


def test_broadcast_decodes_json_and_rejects_other_bytes():
    assert messages.broadcast(OneOfTwo(b'{"a": 1}'), {}) == {"a": 1}
    with pytest.raises(ValueError, match="codec can't decode"):
        messages.broadcast(OneOfTwo(b"\x80\x04pickle"), {})


def test_agree_is_true_only_for_equal_values():
    assert messages.agree(OneOfTwo(b""), "here")
    assert not messages.agree(OneOfTwo(b"x" * 32), "here")


OBJECTS = "allgather allreduce alltoall bcast bsend exscan gather ibsend irecv isend issend recv reduce scan scatter "
OBJECTS += "send sendrecv ssend"


@pytest.mark.parametrize("path", sorted(Path(tfdist.__file__).parent.rglob("*.py")), ids=lambda path: path.name)
def test_no_pickle_and_no_method_of_mpi4py_for_objects(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, node.lineno
    if path.name not in ("mpi.py", "library.py", "messages.py", "world.py"):
        return  # the others hold no communicators of mpi4py
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OBJECTS.split():
            assert not ast.unparse(node.value).endswith("comm"), f"{path.name}:{node.lineno}"
