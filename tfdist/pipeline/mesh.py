"""The processes of a job as a mesh: the workers of a pipeline one way, pipelines beside each other the other way."""

from __future__ import annotations

from tfdist.engine.group import Group


class Mesh:
    """Processes in rows and columns, seen from one of them.

    The processes of one worker, a copy of its stages each, have ranks in sequence: on machines with several processes
    gradients, of which more is sent than of activations, then stay inside.

    Args:
        group: all processes.
        data: number of pipelines, each with its own part of the data.

    Attributes:
        everyone: as given.
        data: as given.
        workers: number of processes of each pipeline.
        worker: this process's place in its pipeline.
        replica: the number of this process's pipeline.
        pipeline: the processes of this process's pipeline, in the order of workers.
        replicas: the processes that are the same worker of all pipelines.

    Raises:
        ValueError: ``data`` does not divide the number of processes.
    """

    def __init__(self, group: Group, data: int) -> None:
        if data < 1 or group.size % data:
            fits = [one for one in range(1, group.size + 1) if group.size % one == 0]
            raise ValueError(
                f"PipelineStrategy(data={data}) divides {group.size} process(es) into {data} pipelines of equal "
                f"length; data= may be one of {fits}"
            )
        self.everyone = group
        self.data = data
        self.workers = group.size // data
        self.worker, self.replica = divmod(group.rank, data)
        self.pipeline = group.subgroup(tuple(worker * data + self.replica for worker in range(self.workers)))
        self.replicas = group.subgroup(tuple(self.worker * data + replica for replica in range(data)))

    def rank(self, worker: int, replica: int) -> int:
        """The rank of a process among all.

        Args:
            worker: its place in its pipeline.
            replica: the number of its pipeline.
        """
        return worker * self.data + replica
