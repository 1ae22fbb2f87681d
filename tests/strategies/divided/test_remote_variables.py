"""Variables of other processes, which a leader reads and assigns."""

import threading

import keras
import numpy as np
import pytest

from tfdist.sharding import Ownership
from tfdist.strategies.divided import described_variables
from tfdist.strategies.divided.described_variables import ElsewhereError, allocate, describing, leave_to
from tfdist.strategies.divided.remote_variables import RemoteVariables

described_variables.install()

_building = threading.Lock()


def variables_of(group):
    """A variable of each process, with values that tell by whom."""
    with _building, describing():
        made = [
            keras.Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(2,), dtype=dtype)
            for dtype in ("float32", "int64")
        ]
        for owner, variable in enumerate(made):
            if owner == group.rank:
                allocate(variable)
                variable.assign([group.rank, 10 * owner])
            else:
                leave_to(variable, f"rank {owner}")
    owners = {id(variable): owner for owner, variable in enumerate(made)}
    return made, RemoteVariables(group, lambda variable: Ownership(owners[id(variable)]), made, "m")


def test_the_leader_reads_and_assigns_all(ranks):
    def work(group):
        variables, remote = variables_of(group)
        if group.rank:
            remote.answer()
            return variables[1].numpy().tolist()
        with remote.led():
            values = [variable.numpy().tolist() for variable in variables]
            variables[1].assign([7, 8])
        with pytest.raises(ElsewhereError, match="held by rank 1"):
            variables[1].numpy()
        return values

    assert ranks(2)(work) == [[[0, 0], [1, 10]], [7, 8]]


def test_others_are_released_when_the_leader_fails(ranks):
    def work(group):
        _, remote = variables_of(group)
        if group.rank:
            remote.answer()
            return "released"
        with pytest.raises(OSError, match="disk full"), remote.led():
            raise OSError("disk full")
        return "failed"

    assert ranks(2)(work) == ["failed", "released"]


def test_the_leader_reads_and_assigns_rows(ranks):
    """Each process has some rows of a variable, which none has whole."""
    owner = Ownership(None, (0, 1, 3))

    def work(group):
        with _building, describing():
            variable = keras.Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(3, 2), dtype="float32")
            part = described_variables.keep_part(variable, owner.part(group.rank))
        part.assign(part + group.rank)
        remote = RemoteVariables(group, lambda _: owner, [variable], "m", lambda _: part)
        if group.rank:
            remote.answer()
            return part.numpy().tolist()
        with remote.led():
            before = variable.numpy().tolist()
            variable.assign([[1, 2], [3, 4], [5, 6]])
        return before, part.numpy().tolist()

    assert ranks(2)(work) == [([[0, 0], [1, 1], [1, 1]], [[1, 2]]), [[3, 4], [5, 6]]]
