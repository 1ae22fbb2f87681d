"""Variables of other processes; that files of models are written and read so is in the tests over processes."""

import threading

import keras
import numpy as np
import pytest

from tfdist.pipeline.mesh import PipelineMesh, side_by_side
from tfdist.pipeline.variables_of_stages import VariablesOfStages
from tfdist.strategies.divided import described_variables
from tfdist.strategies.divided.described_variables import ElsewhereError, allocate, describing, leave_to

described_variables.install()


class Places:
    """A variable of each worker, and one of all."""

    def __init__(self, variables, worker):
        self._workers = {id(variables[0]): (0,), id(variables[1]): (1,), id(variables[2]): ()}
        self._worker = worker

    def workers(self, variable):
        return self._workers[id(variable)]

    def holds(self, variable):
        return self._worker in self.workers(variable) or not self.workers(variable)


_building = threading.Lock()


def variables_of(group):
    """The variables of one process, with values that tell by whom."""
    with _building, describing():
        made = [keras.Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(2,)) for _ in range(3)]
        places = Places(made, group.rank)
        for place, variable in enumerate(made):
            if places.holds(variable):
                allocate(variable)
                variable.assign([group.rank, 10.0 * place])
            else:
                leave_to(variable, f"worker {place}")
    return made, VariablesOfStages(PipelineMesh(group, side_by_side(group.size, 1)), places, made, "m")


def test_the_leader_reads_and_assigns_all(ranks):
    def work(group):
        variables, remote = variables_of(group)
        if group.rank:
            remote.answer()
            return variables[1].numpy().tolist()
        with remote.led():
            values = [variable.numpy().tolist() for variable in variables]
            variables[1].assign([7.0, 8.0])
        with pytest.raises(ElsewhereError, match="held by worker 1"):
            variables[1].numpy()
        return values

    assert ranks(2)(work) == [[[0, 0], [1, 10], [0, 20]], [7.0, 8.0]]


def test_broadcast_returns_owners_values_on_all_ranks(ranks):
    def work(group):
        variables, remote = variables_of(group)
        remote.equalize(variables)
        return [remote.broadcast(variable).tolist() for variable in variables]

    assert ranks(2)(work) == [[[0, 0], [1, 10], [0, 20]]] * 2


def test_pipelines_of_one_process_each_have_all_stages(ranks):
    """Each process of both pipelines has the variables of both workers, and gets the first one's values."""

    def work(group):
        made = [keras.Variable([10.0 * place + group.rank]) for place in range(3)]
        places = Places(made, 0)
        places.holds = lambda variable: True
        VariablesOfStages(PipelineMesh(group, side_by_side(2, 2)), places, made, "m").equalize(made)
        return [variable.numpy().tolist() for variable in made]

    assert ranks(2)(work) == [[[0.0], [10.0], [20.0]]] * 2
