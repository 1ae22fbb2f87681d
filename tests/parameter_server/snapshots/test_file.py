"""One file: what NumPy alone reads of it, every dtype, and damage of every byte."""

import io
import json
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest

from tests.parameter_server.snapshots.states import (
    DIGEST,
    OPTIMIZER,
    assert_same_array,
    assert_same_parts,
    model,
    parts_of,
    rows_of,
    shard,
)
from tfdist.parameter_server.protocol.state import ShardProgress
from tfdist.parameter_server.snapshots import file
from tfdist.parameter_server.snapshots.file import DamagedError, describe, load, save
from tfdist.parameter_server.snapshots.state import PartState, ShardState, SnapshotError


def saved(path, state):
    with path.open("wb") as file:
        save(file, state)
    return path


def of_one(value, digest=DIGEST, **slots):
    """A state of one whole variable."""
    part = PartState("w", 0, len(value) if value.ndim else 1, len(value) if value.ndim else 1, value, slots)
    return ShardState(digest, {}, {}, (part,), ShardProgress(1))


def test_numpy_alone_reads_the_file(tmp_path):
    path = saved(tmp_path / "file.npz", shard(1, 2, 5))
    rows = {path: (begin, end) for path, begin, end in rows_of(1, 2)}
    with np.load(path, allow_pickle=False) as file:
        metadata = json.loads(file["metadata"].tobytes())
        assert metadata["digest"] == DIGEST
        assert metadata["optimizer"] == OPTIMIZER
        applied = [[0, (1 << 63) - 1, 4], [3, 17, 0]]
        assert metadata["progress"] == {"version": 5, "counted": {"0": 5, "3": 1}, "applied": applied, "assigned": 3}
        assert file["scalar:iterations"] == 5
        begin, end = rows["embedding/embeddings"]
        value, slots = model(5)["embedding/embeddings"]
        assert_same_array(file["value:embedding/embeddings"], value[begin:end])
        assert_same_array(file["slot:embedding/embeddings:momentum"], slots["momentum"][begin:end])
        begin, end = rows["table/embeddings"]
        [part] = [part for part in metadata["parts"] if part["path"] == "table/embeddings"]
        assert (part["begin"], part["end"], part["rows"]) == (begin, end, 70_001)
        assert part["value"] == {
            "name": "value:table/embeddings",
            "dtype": "bfloat16",
            "shape": [end - begin, 2],
        }
        raw = file[part["value"]["name"]]
        assert raw.dtype == np.uint16
        assert_same_array(raw.view(ml_dtypes.bfloat16), model(5)["table/embeddings"][0][begin:end])


def test_file_is_not_compressed(tmp_path):
    value = np.zeros((1000, 100), np.float32)
    assert value.nbytes < saved(tmp_path / "file.npz", of_one(value)).stat().st_size < value.nbytes + 2000


@pytest.mark.parametrize(
    "dtype",
    "bool int8 uint8 int64 uint64 float16 float32 float64 complex64 bfloat16 float8_e4m3fn float8_e5m2 int4".split(),
)
@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (0, 2), (3, 0)])
def test_every_dtype_and_shape_is_restored(tmp_path, dtype, shape):
    value = np.asarray(np.random.default_rng(0).integers(-8, 8, shape)).astype(np.dtype(dtype))
    path = saved(tmp_path / "file.npz", of_one(value, momentum=value, count=np.array(3, np.uint8)))
    rows = len(value) if shape else 1
    [part], _ = load(path, [(0, 0, rows)], with_scalars=False)
    assert_same_array(part.value, value)
    assert_same_array(part.slots["momentum"], value)
    assert part.slots["count"] == 3


def test_nonfinite_values_are_restored(tmp_path):
    value = np.array([np.nan, np.inf, -0.0, 5e-324])
    path = saved(tmp_path / "file.npz", of_one(value))
    [part], _ = load(path, [(0, 0, 4)], with_scalars=False)
    assert_same_array(part.value, value)
    assert describe(saved(path, shard(0, 1))).optimizer["config"]["limit"] == float("inf")


@pytest.mark.parametrize("layout", [lambda array: array[::2, ::3], lambda array: array.T, np.asfortranarray])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_arrays_of_any_memory_layout_are_restored(tmp_path, layout, dtype):
    value = layout(np.arange(54).reshape(6, 9).astype(dtype))
    path = saved(tmp_path / "file.npz", of_one(value))
    [part], _ = load(path, [(0, 1, 3)], with_scalars=False)
    assert_same_array(part.value, value[1:3])


@pytest.mark.parametrize("array", [np.array([None]), np.array(["a"]), np.zeros(2, "f4,i4"), np.zeros(2, ">f4")])
def test_other_dtypes_are_refused(array):
    """Objects would be pickled."""
    with pytest.raises(TypeError, match="'value:w' cannot be stored in a snapshot: its dtype is"):
        save(io.BytesIO(), of_one(array))


def test_configs_that_are_no_json_are_refused():
    with pytest.raises(TypeError):
        save(io.BytesIO(), ShardState(DIGEST, {"rate": object()}, {}, (), ShardProgress(1)))


@pytest.mark.parametrize("chunk", [1000, 7000, 1 << 20])
def test_selected_rows_of_selected_parts_are_read(tmp_path, monkeypatch, chunk):
    """Whatever is written and read at a time."""
    monkeypatch.setattr(file, "_CHUNK", chunk)
    path = saved(tmp_path / "file.npz", shard(0, 1))
    paths = [part.path for part in describe(path).parts]
    wanted = [("table/embeddings", 12_345, 70_001), ("embedding/embeddings", 0, 1), ("temperature", 0, 1)]
    parts, scalars = load(path, [(paths.index(name), begin, end) for name, begin, end in wanted], with_scalars=True)
    assert_same_parts(parts, list(parts_of(7, wanted)))
    assert scalars["iterations"] == 7
    assert load(path, [], with_scalars=False) == ([], {})


def test_ambiguous_names_are_kept_apart(tmp_path):
    parts = tuple(
        PartState(path, 0, 1, 1, np.array(number), {slot: np.array(number + 1)})
        for number, (path, slot) in enumerate((("a:b", "c"), ("a", "b:c"), ("/ü ../x", "file")))
    )
    path = saved(tmp_path / "file.npz", ShardState(DIGEST, {}, {}, parts, ShardProgress(1)))
    loaded, _ = load(path, [(index, 0, 1) for index in range(3)], with_scalars=False)
    assert_same_parts(loaded, parts)


def test_damage_of_any_byte_is_found_or_harmless(tmp_path):
    """Each byte changes in turn: what is read then is what was written, or nothing."""
    state = of_one(np.arange(3, dtype=np.float32), momentum=np.ones(3, ml_dtypes.bfloat16))
    content = saved(tmp_path / "whole.npz", state).read_bytes()
    path = tmp_path / "file.npz"
    damaged = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        try:
            metadata = describe(path)
            parts, _ = load(path, [(0, 0, 3)], with_scalars=True)
        except DamagedError:
            damaged += 1
        else:
            assert (metadata.digest, metadata.progress.version) == (DIGEST, 1)
            assert_same_parts(parts, state.parts)
    assert damaged > len(content) / 2


def test_truncated_file_raises(tmp_path):
    content = saved(tmp_path / "whole.npz", of_one(np.arange(3, dtype=np.float32))).read_bytes()
    path = tmp_path / "file.npz"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(DamagedError) as caught:
            describe(path)
        assert caught.value.path == path


def test_newer_format_version_raises(tmp_path):
    path = tmp_path / "file.npz"
    later = json.dumps({"format": "tfdist snapshot", "format_version": 2, "unknown": []})
    np.savez(path, metadata=np.frombuffer(later.encode(), np.uint8))
    with pytest.raises(SnapshotError, match=r"version 2 of the format; this release of tfdist reads version 1\. Use"):
        describe(path)


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"[1]",
        b"{}",
        b'{"format": "tfdist snapshot", "format_version": 1}',
        b'{"format": "x", "format_version": 1}',
    ],
)
def test_invalid_metadata_raise(tmp_path, metadata):
    path = tmp_path / "file.npz"
    np.savez(path, metadata=np.frombuffer(metadata, np.uint8))
    with pytest.raises(DamagedError):
        describe(path)


def changed(path, **arrays):
    """Replaces arrays of a file; the metadata stays."""
    with np.load(path) as file:
        np.savez(path, **(dict(file) | {name.replace("_", ":"): array for name, array in arrays.items()}))
    return path


@pytest.mark.parametrize(
    "other",
    [np.array([None]), np.array([b"12345678"]), np.zeros(1, np.int64), np.zeros(2), np.zeros((1, 1)), np.array(0.0)],
)
def test_arrays_that_contradict_the_metadata_raise(tmp_path, other):
    """Objects, which would be unpickled, and other bits of the same size are not taken."""
    path = changed(saved(tmp_path / "file.npz", of_one(np.zeros(1))), value_w=other)
    with pytest.raises(DamagedError, match=r"the array 'value:w' is .* expected float64"):
        load(path, [(0, 0, 1)], with_scalars=False)


def test_oversized_array_header_raises(tmp_path):
    """No memory is allocated for it."""
    path = tmp_path / "file.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("metadata.npy", "w") as entry:
        np.lib.format.write_array_header_1_0(entry, {"descr": "|u1", "fortran_order": False, "shape": (1 << 60,)})
        entry.write(b"{}")
    with pytest.raises(DamagedError, match="'metadata' is uint8"):
        describe(path)


def test_import_loads_no_tensorflow():
    imported = "import sys, tfdist.parameter_server.snapshots.sharded"
    program = f"{imported}; print('tensorflow' in sys.modules, 'keras' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]
