import pytest

from tfdist.cluster.spec import Cluster, Task
from tfdist.strategies.devices import devices

TASKS = (
    Task("chief", 0, "a:1"),
    Task("worker", 0, "a:2"),
    Task("worker", 1, "b:1"),
    Task("ps", 0, "a:3"),
    Task("evaluator", 0, "b:2"),
)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (TASKS[0], (0, 2)),
        (TASKS[1], (1, 2)),
        (TASKS[2], (0, 2)),
        (TASKS[4], (1, 2)),
        (Task("worker", 7, ""), (7, 8)),
    ],
)
def test_place_on_host(task, expected):
    """Servers take no GPU; a worker that the cluster does not name shares one."""
    assert devices.place_on_host(Cluster(TASKS, task)) == expected


def test_a_process_alone_has_its_host():
    assert devices.place_on_host(None) == (0, 1)


@pytest.mark.parametrize(
    ("gpus", "place", "visible", "named"),
    [
        (0, (0, 1), None, ["CPU:0"]),
        (4, (0, 1), None, ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]),
        (4, (1, 2), ["gpu 2", "gpu 3"], ["GPU:0", "GPU:1"]),
        (2, (2, 3), ["gpu 0"], ["GPU:0"]),
        (2, (7, 8), ["gpu 1"], ["GPU:0"]),
    ],
)
def test_gpus_are_divided(monkeypatch, gpus, place, visible, named):
    """GPUs that there are not; the calls of TensorFlow that hide some of them are replaced."""
    all_gpus, seen = [f"gpu {number}" for number in range(gpus)], []
    monkeypatch.setattr(devices.tf.config, "list_physical_devices", lambda kind: all_gpus)
    monkeypatch.setattr(devices.tf.config, "set_visible_devices", lambda own, kind: seen.append(own))
    monkeypatch.setattr(devices.tf.config, "get_visible_devices", lambda kind: seen[-1] if seen else all_gpus)
    assert devices.default_devices(*place) == named
    assert seen == ([visible] if visible else [])


def test_what_tensorflow_uses_already_is_told(monkeypatch):
    def refuses(own, kind):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(devices.tf.config, "list_physical_devices", lambda kind: ["gpu 0", "gpu 1"])
    monkeypatch.setattr(devices.tf.config, "set_visible_devices", refuses)
    with pytest.raises(RuntimeError, match="made before TensorFlow uses a GPU"):
        devices.default_devices(0, 2)
    devices.hide_gpus()
