"""The processes of a job by worker of a pipeline, and by pipeline."""

from __future__ import annotations

from tfdist.engine.group import ProcessGroup
from tfdist.runtime.mesh import Mesh

STAGE = "stage"
"""Name of a mesh's axis along which the workers of a pipeline are."""


class PipelineMesh:
    """A mesh of processes, of which each line along the axis `STAGE` is a pipeline, seen from one process.

    Args:
        group: all processes.
        mesh: their mesh; without the axis `STAGE` each pipeline is one process.

    Attributes:
        all_processes: the group of all processes.
        mesh: as given, with the axis `STAGE`.
        data: number of pipelines, each with its own part of the data.
        workers: number of processes of each pipeline.
        worker: number of this process in its pipeline.
        replica: number of this process's pipeline.
        pipeline: group of the processes of this process's pipeline, in the order of workers.
        replicas: group of the processes that are the same worker in all pipelines.

    Raises:
        ValueError: the mesh has another number of processes.
    """

    def __init__(self, group: ProcessGroup, mesh: Mesh) -> None:
        mesh.check_size(group.size)
        self.all_processes = group
        self.mesh = mesh if STAGE in mesh.axes else Mesh(**{STAGE: 1}, **mesh.axes)
        self.workers = self.mesh.axes[STAGE]
        self.data = group.size // self.workers
        self.worker = self.mesh.place(STAGE, group.rank)
        line, copies = self.mesh.along(STAGE, group.rank), self.mesh.across(STAGE, group.rank)
        self.replica = copies.index(group.rank)
        self.pipeline = group.subgroup(line)
        self.replicas = group.subgroup(copies)

    def rank(self, worker: int, replica: int) -> int:
        """Returns the rank of a process among all processes.

        Args:
            worker: number of the process in its pipeline.
            replica: number of the process's pipeline.
        """
        return self.ranks(worker)[replica]

    def ranks(self, worker: int) -> tuple[int, ...]:
        """Returns the ranks of the processes that are a worker, by pipeline.

        Args:
            worker: number of the worker; if a pipeline is one process, this is all workers.
        """
        line = self.mesh.along(STAGE, self.all_processes.rank)
        return self.mesh.across(STAGE, line[worker if self.workers > 1 else 0])


def side_by_side(processes: int, data: int) -> Mesh:
    """Returns a mesh of some pipelines side by side.

    The processes of one worker, which have copies of the same stages, have consecutive ranks. So if a machine has
    several processes, gradients stay on the machine; more bytes are sent of them than of activations.

    Args:
        processes: number of all processes.
        data: number of pipelines.

    Raises:
        ValueError: ``data`` does not divide the number of processes.
    """
    if data < 1 or processes % data:
        fits = [count for count in range(1, processes + 1) if processes % count == 0]
        raise ValueError(
            f"PipelineStrategy(data={data}) cannot divide {processes} process(es) into {data} pipelines of equal "
            f"length; choose data= from {fits}"
        )
    return Mesh(**{STAGE: processes // data}, data=data)
