"""Many ranks in one thread: each rank's schedule is resumed as its transfers complete."""

from tfdist.comm.local import LocalWorld


def simulate(size, plan_of, **world):
    """Runs ``plan_of(rank)`` on every rank of a `LocalWorld`; returns the results and the communicators.

    Further arguments are those of `LocalWorld`.
    """
    world = LocalWorld(size, **world)
    communicators = [world.communicator(rank) for rank in range(size)]
    schedules = [plan_of(rank)(communicators[rank], 0) for rank in range(size)]
    waiting = dict.fromkeys(range(size), ())
    results = [None] * size
    while waiting:
        moved = False
        for rank, requests in list(waiting.items()):
            if communicators[rank].completed(requests):
                moved = True
                try:
                    waiting[rank] = next(schedules[rank])
                except StopIteration as stop:
                    results[rank] = stop.value
                    del waiting[rank]
        assert moved, f"ranks {sorted(waiting)} wait for each other"
    return results, communicators
