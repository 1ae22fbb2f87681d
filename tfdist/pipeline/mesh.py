"""The processes of a job as a mesh: workers of a pipeline along one axis, pipelines side by side along the other."""

from __future__ import annotations

from tfdist.engine.group import ProcessGroup


class Mesh:
    """A mesh of processes by worker and pipeline, seen from one of them.

    The processes of one worker, which have copies of the same stages, have consecutive ranks. So if a machine has
    several processes, gradients stay on the machine; more bytes are sent of them than of activations.

    Args:
        group: all processes.
        data: number of pipelines, each with its own part of the data.

    Attributes:
        all_processes: the group of all processes.
        data: as given.
        workers: number of processes of each pipeline.
        worker: number of this process in its pipeline.
        replica: number of this process's pipeline.
        pipeline: group of the processes of this process's pipeline, in the order of workers.
        replicas: group of the processes that are the same worker in all pipelines.

    Raises:
        ValueError: ``data`` does not divide the number of processes.
    """

    def __init__(self, group: ProcessGroup, data: int) -> None:
        if data < 1 or group.size % data:
            fits = [count for count in range(1, group.size + 1) if group.size % count == 0]
            raise ValueError(
                f"PipelineStrategy(data={data}) cannot divide {group.size} process(es) into {data} pipelines of equal "
                f"length; choose data= from {fits}"
            )
        self.all_processes = group
        self.data = data
        self.workers = group.size // data
        self.worker, self.replica = divmod(group.rank, data)
        self.pipeline = group.subgroup(tuple(worker * data + self.replica for worker in range(self.workers)))
        self.replicas = group.subgroup(tuple(self.worker * data + replica for replica in range(data)))

    def rank(self, worker: int, replica: int) -> int:
        """Returns the rank of a process among all processes.

        Args:
            worker: number of the process in its pipeline.
            replica: number of the process's pipeline.
        """
        return worker * self.data + replica
