"""The checks of `tfdist doctor` for GPUs: the driver, TensorFlow's build, and the results of each GPU and of all."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cli.findings import Finding, Severity

if TYPE_CHECKING:
    import numpy as np

_MEBIBYTES = 64
_TOLERANCE = 1e-4
"""Maximum difference of a GPU's and the CPU's float32 weights after a few steps."""
_STEPS = 5
_TIMEOUT_SECONDS = 60.0
"""Seconds after which a sum over GPUs that does not end is an error."""


_LIBRARIES = ("nccl", "cuda-runtime", "cudnn")
"""Those of NVIDIA's packages that decide most about what works."""


def listed() -> Iterator[Finding]:
    """Lists the GPUs that the driver finds, whether they reach each other, and libraries; nothing without a driver."""
    if not shutil.which("nvidia-smi"):
        return
    result = _nvidia_smi("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader")
    gpus = [line.strip() for line in result.stdout.splitlines() if line[:1].isdigit()]
    for gpu in gpus:
        index, name, memory, driver = (part.strip() for part in gpu.split(","))
        yield Finding(Severity.OK, f"GPU {index}", f"{name}, {memory}, driver {driver}")
    if not gpus:
        yield Finding(Severity.NOTE, "GPU", f"nvidia-smi finds no GPU: {(result.stdout + result.stderr).strip()}")
    if len(gpus) > 1:
        yield _peer_access(_nvidia_smi("topo", "-p2p", "r").stdout, len(gpus))
    if gpus:
        yield _libraries(dict(_installed()))


def _installed() -> Iterator[tuple[str, str]]:
    """Returns the names of this environment's packages, in small letters, and their versions."""
    for package in importlib.metadata.distributions():
        yield str(package.metadata["Name"]).lower(), package.version


def _libraries(installed: dict[str, str]) -> Finding:
    """Lists NCCL and other libraries that were installed with TensorFlow, or says what is used in their place."""
    if "tensorflow-cpu" in installed:
        advice = "`pip install 'tfdist[gpu]'` in a new environment"
        return Finding(Severity.NOTE, "GPU libraries", "the package tensorflow-cpu does not use GPUs", advice)
    found = [
        f"{name} {version}"
        for name in _LIBRARIES
        for package, version in installed.items()
        if package.startswith(f"nvidia-{name}")
    ]
    missing = "none in this environment: TensorFlow looks for the machine's own; `tfdist doctor --gpu` tries them"
    return Finding(Severity.OK if found else Severity.NOTE, "GPU libraries", ", ".join(found) or missing)


def _nvidia_smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False)


def _peer_access(matrix: str, gpus: int) -> Finding:
    """Reads the driver's table of which GPU can read which one's memory: ``X`` is a GPU itself, ``OK`` a yes."""
    rows = [row.split() for row in re.findall(r"^\W*GPU\d+((?:[ \t]+[A-Z/]+)+)\s*$", matrix, re.MULTILINE)]
    if [len(row) for row in rows] != [gpus] * gpus:
        return Finding(Severity.NOTE, "peer access", "the driver does not say which GPUs reach each other's memory")
    apart = [
        f"{reader} of {other} ({how})"
        for reader, row in enumerate(rows)
        for other, how in enumerate(row)
        if how not in ("X", "OK")
    ]
    if not apart:
        return Finding(Severity.OK, "peer access", "every GPU reads the memory of every other one")
    text = f"not every GPU reads the others' memory: not {', '.join(apart)}. Copies between them pass through the host"
    return Finding(Severity.NOTE, "peer access", text)


def try_all() -> Iterator[Finding]:
    """Copies, sums and trains on each GPU that TensorFlow finds, compares with the CPU, and sums over all GPUs."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    gpus = tf.config.list_physical_devices("GPU")
    if not build["is_cuda_build"] and not build.get("is_rocm_build"):
        advice = "install TensorFlow for GPUs: `pip install 'tfdist[gpu]'` in a new environment"
        yield Finding(Severity.PROBLEM, "GPU", "this TensorFlow was built without support for GPUs", advice)
        return
    names = [name for name in ("cuda", "cudnn") if f"{name}_version" in build]
    versions = ", ".join(f"{name} {build[f'{name}_version']}" for name in names)
    if not gpus:
        advice = "see on stderr which library TensorFlow lacks; `pip install 'tfdist[gpu]'` installs them all"
        yield Finding(Severity.PROBLEM, "GPU", f"TensorFlow, built for {versions}, finds no GPU", advice)
        return
    yield Finding(Severity.OK, "GPU", f"TensorFlow is built for {versions}, and finds {len(gpus)} GPU(s)")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    expected = trained("CPU:0")
    devices = [f"GPU:{number}" for number in range(len(gpus))]
    for device in devices:
        yield from _tried(device, expected)
    if len(devices) > 1:
        yield _tried_together(devices)


def _tried(device: str, expected: np.ndarray) -> Iterator[Finding]:
    import numpy as np
    import tensorflow as tf

    try:
        yield Finding(Severity.OK, device, copied(device))
        difference = float(np.abs(trained(device) - expected).max())
    except tf.errors.OpError as error:
        advice = "check that no other process uses its memory (nvidia-smi), and that the driver is new enough"
        yield Finding(Severity.PROBLEM, device, f"cannot compute: {_first_line(error)}", advice)
        return
    text = f"after {_STEPS} steps, weights differ from the CPU's by {difference:.1g}"
    level = Severity.OK if difference < _TOLERANCE else Severity.PROBLEM
    advice = "" if level is Severity.OK else f"they should differ by less than {_TOLERANCE}: do not trust this GPU"
    yield Finding(level, device, text, advice)


def _first_line(error: Exception) -> str:
    return str(getattr(error, "message", error)).partition("\n")[0]


def _tried_together(devices: Sequence[str]) -> Finding:
    import tensorflow as tf

    subject = f"{len(devices)} GPUs"
    try:
        return Finding(Severity.OK, subject, summed(devices))
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        advice = "set NCCL_DEBUG=INFO to see what NCCL says; train with one process for each GPU meanwhile"
        return Finding(Severity.PROBLEM, subject, f"cannot sum together: {_first_line(error)}", advice)


def summed(devices: Sequence[str]) -> str:
    """Sums a vector over devices of this process, as TensorFlow does in `tf.distribute`: by NCCL between GPUs.

    Args:
        devices: names of the devices.

    Returns:
        A text with the milliseconds of the sum.

    Raises:
        tf.errors.DataLossError: the sum is wrong.
    """
    import numpy as np
    import tensorflow as tf

    vector = np.random.default_rng(0).integers(-9, 9, _MEBIBYTES << 18).astype(np.float32)
    strategy = tf.distribute.MirroredStrategy(devices)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS)

    @tf.function
    def over_all(given: tf.Tensor) -> Any:
        def own() -> tf.Tensor:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return given * tf.cast(replica + 1, tf.float32)

        values = strategy.run(own)
        return strategy.extended.reduce_to("SUM", values, values, options)

    for _ in range(2):  # the first round also sets NCCL up
        begun = time.perf_counter()
        totals = [total.numpy() for total in strategy.experimental_local_results(over_all(tf.constant(vector)))]
        seconds = time.perf_counter() - begun
    ranks = len(devices) * (len(devices) + 1) / 2
    if not all(np.array_equal(total, ranks * vector) for total in totals):
        raise tf.errors.DataLossError(None, None, "the sum of a vector over the devices is wrong")
    return f"sum {_MEBIBYTES} MiB, and copy the sums to the host, in {1e3 * seconds:.0f} ms; sums are right"


def copied(device: str) -> str:
    """Copies a vector to a device and back, and sums it there.

    Args:
        device: name of the device, such as "GPU:0".

    Returns:
        A text with the rates of both copies.

    Raises:
        tf.errors.DataLossError: the copied vector or its sum is wrong.
    """
    import numpy as np
    import tensorflow as tf

    vector = np.random.default_rng(0).integers(-9, 9, _MEBIBYTES << 18).astype(np.float32)  # sums are exact
    rates = []
    for _ in range(3):  # the first round also starts the device
        begun = time.perf_counter()
        with tf.device(device):
            there = tf.identity(tf.constant(vector))
            total = float(tf.reduce_sum(there))
        rates.append(vector.nbytes / (time.perf_counter() - begun) / 1e9)
        begun = time.perf_counter()
        back = there.numpy()
        rates.append(vector.nbytes / (time.perf_counter() - begun) / 1e9)
        if not np.array_equal(back, vector) or total != vector.sum(dtype=np.float64):
            raise tf.errors.DataLossError(None, None, "a vector came back changed, or its sum on the device is wrong")
    return f"{_MEBIBYTES} MiB are copied there at {rates[-2]:.1f} GB/s and back at {rates[-1]:.1f} GB/s; sums are right"


def trained(device: str) -> np.ndarray:
    """Returns the weights of a small model after a few steps on a device, as one vector."""
    import keras
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    images = generator.normal(size=(16, 12, 12, 3)).astype(np.float32)
    labels = generator.integers(0, 10, 16)
    layers: Any = keras.layers
    keras.utils.set_random_seed(0)
    with tf.device(device):
        model = keras.Sequential(
            [
                layers.Input(images.shape[1:]),
                layers.Conv2D(8, 3),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
        for _ in range(_STEPS):
            model.train_on_batch(images, labels)
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])
