import pytest

from tfdist.cluster.spec import Cluster, Task
from tfdist.comm.page_locks import page_locks
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


@pytest.fixture(autouse=True)
def _unlocked(monkeypatch):
    """Leaves the memory of later tests alone."""
    monkeypatch.setattr(page_locks, "device", None)


class Gpus:
    """GPUs that there are not: what replaces TensorFlow's configuration of devices.

    Attributes:
        visible: those that TensorFlow would use.
        growth: whether memory is taken as needed, by GPU; None where nobody has decided.
        divided: the logical devices of GPUs that the user has divided.
        is_initialized: whether it is too late for changes.
    """

    def __init__(self, count):
        self.all = [f"gpu {number}" for number in range(count)]
        self.tpus = []
        self.visible = list(self.all)
        self.growth = dict.fromkeys(self.all)
        self.divided = {}
        self.is_initialized = False

    def replace(self, monkeypatch):
        config = devices.tf.config
        monkeypatch.setattr(config, "list_physical_devices", lambda kind: self.all if kind == "GPU" else self.tpus)
        monkeypatch.setattr(config, "get_visible_devices", lambda kind: list(self.visible))
        monkeypatch.setattr(config, "set_visible_devices", self._set_visible)
        monkeypatch.setattr(config, "get_logical_device_configuration", self.divided.get)
        monkeypatch.setattr(config.experimental, "get_memory_growth", self.growth.get)
        monkeypatch.setattr(config.experimental, "set_memory_growth", self._set_growth)
        monkeypatch.setattr(config, "list_logical_devices", None)  # it would initialize them
        return self

    def _set_visible(self, gpus, kind):
        if self.is_initialized:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = gpus

    def _set_growth(self, gpu, growth):
        if self.is_initialized:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.growth[gpu] = growth


@pytest.mark.parametrize(
    ("count", "place", "visible", "named"),
    [
        (0, (0, 1), [], ["CPU:0"]),
        (4, (0, 1), [0, 1, 2, 3], ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]),
        (4, (1, 2), [2, 3], ["GPU:0", "GPU:1"]),
        (2, (2, 3), [0], ["GPU:0"]),
        (2, (7, 8), [1], ["GPU:0"]),
    ],
)
def test_gpus_are_divided(monkeypatch, count, place, visible, named):
    """Memory of the host is locked for the first of a process."""
    gpus = Gpus(count).replace(monkeypatch)
    assert devices.own_devices(None, *place) == named
    assert gpus.visible == [f"gpu {number}" for number in visible]
    assert devices.own_devices(None, *place) == named, "a second strategy gets the same"
    assert page_locks.device == (visible[0] if visible else None)


def test_gpus_made_visible_by_user_are_kept(monkeypatch):
    gpus = Gpus(4).replace(monkeypatch)
    gpus.visible = ["gpu 3"]
    assert devices.own_devices(None, 0, 2) == ["GPU:0"]
    assert gpus.visible == ["gpu 3"]
    gpus.divided["gpu 3"] = ["half", "half"]
    assert devices.own_devices(None, 0, 2) == ["GPU:0", "GPU:1"]


@pytest.mark.parametrize(
    ("count", "asked", "size", "shared"),
    [
        (1, None, 1, False),
        (1, None, 2, True),
        (2, None, 2, False),
        (2, None, 3, True),
        (2, ["/device:GPU:0"], 2, True),
        (2, ["/device:GPU:0"], 1, False),
        (1, ["/device:CPU:0"], 2, False),
    ],
)
def test_memory_of_gpus_that_are_shared_is_taken_as_needed(monkeypatch, count, asked, size, shared):
    gpus = Gpus(count).replace(monkeypatch)
    device_names = devices.own_devices(asked, 0, size)
    assert device_names == (asked or ["GPU:0"])
    assert list(gpus.growth.values()) == [True if shared else None] * count


def test_memory_settings_of_the_user_are_kept(monkeypatch):
    gpus = Gpus(3).replace(monkeypatch)
    gpus.growth["gpu 0"] = False
    devices.own_devices(None, 0, 4)
    assert gpus.growth == {"gpu 0": False, "gpu 1": None, "gpu 2": None}, "TensorFlow wants them alike"
    gpus = Gpus(2).replace(monkeypatch)
    gpus.divided["gpu 1"] = ["half", "half"]
    devices.own_devices(None, 0, 4)
    assert gpus.growth == {"gpu 0": None, "gpu 1": None}
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    gpus = Gpus(1).replace(monkeypatch)
    devices.own_devices(None, 0, 4)
    assert gpus.growth == {"gpu 0": None}


def test_initialized_gpus_raise_unless_devices_are_given(monkeypatch):
    gpus = Gpus(2).replace(monkeypatch)
    gpus.is_initialized = True
    with pytest.raises(RuntimeError, match=r"TensorFlow already uses a GPU.* make the strategy first"):
        devices.own_devices(None, 0, 2)
    assert devices.own_devices(["GPU:1"], 0, 2) == ["GPU:1"]
    devices.hide_gpus()


def test_tpus_are_refused_unless_a_device_is_asked_for(monkeypatch):
    gpus = Gpus(0).replace(monkeypatch)
    gpus.tpus = ["tpu 0"]
    with pytest.raises(RuntimeError, match=r'has TPUs, on which .* devices=\["CPU:0"\]'):
        devices.own_devices(None, 0, 1)
    assert devices.own_devices(["CPU:0"], 0, 1) == ["CPU:0"]
