"""One snapshot file: the state of a shard as an uncompressed ``.npz``, which NumPy reads without tfdist.

The file has an array for each value (``value:<path>``), slot (``slot:<path>:<name>``) and scalar (``scalar:<name>``),
and ``metadata``, a JSON text in bytes: the digest, the version, the optimizer, the bookkeeping of pushes, and for each
part its rows and for each array its name, dtype and shape. NumPy's format has no bfloat16 or float8: such arrays are
stored as unsigned integers of the same bits. Nothing is ever pickled. To read a variable with NumPy alone::

    import json
    import numpy as np

    with np.load("snapshots/server-0-of-2.000000123.npz") as file:
        metadata = json.loads(file["metadata"].tobytes())
        kernel = file["value:dense/kernel"]  # this server's rows
        momentum = file["slot:dense/kernel:momentum"]

    [part] = [part for part in metadata["parts"] if part["path"] == "dense/kernel"]
    part["begin"], part["end"], part["rows"]  # the file has rows 0 to 500 of 1000
    if part["value"]["dtype"] == "bfloat16":
        import ml_dtypes

        kernel = kernel.view(ml_dtypes.bfloat16)
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import msgspec
import numpy as np

from tfdist.parameter_server.protocol.state import ShardProgress
from tfdist.parameter_server.snapshots.state import PartState, ShardState, SnapshotError

_FORMAT = "tfdist snapshot"
_VERSION = 1
"""Version of the format, raised whenever it changes in a way that older releases would misread."""
_CHUNK = 1 << 20
"""Bytes that are read or written at a time; a chunk of this size stays in the cache for its checksum."""


class DamagedError(Exception):
    """A file is missing or truncated, fails a check, or is not a snapshot.

    Attributes:
        path: path of the file.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


class StoredArray(msgspec.Struct, frozen=True):
    """Description of an array in a file.

    Attributes:
        name: name of the array in the file.
        dtype: name of the array's dtype; the file may store unsigned integers of the same bits.
        shape: shape of the array.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class StoredPart(msgspec.Struct, frozen=True):
    """Description of a variable's rows in a file; attributes as in `PartState`."""

    path: str
    begin: int
    end: int
    rows: int
    value: StoredArray
    slots: dict[str, StoredArray]


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a file's arrays; other attributes as in `ShardState`.

    Attributes:
        format: constant that marks a snapshot.
        format_version: version of the file's layout.
    """

    format: str = _FORMAT
    format_version: int = _VERSION
    digest: str
    optimizer: dict[str, Any]
    scalars: dict[str, StoredArray]
    parts: tuple[StoredPart, ...]
    progress: ShardProgress
    deals: dict[str, Any] | None = None


class _Version(msgspec.Struct, frozen=True):
    format: str
    format_version: int


def save(file: IO[bytes], state: ShardState) -> None:
    """Writes a state to a file.

    Args:
        file: empty file, open for writing.
        state: state to write; its arrays must not change meanwhile.

    Raises:
        TypeError: an array's dtype, or a value of the optimizer's config, cannot be stored.
        OSError: the file cannot be written.
    """
    arrays: dict[str, np.ndarray] = {}

    def store(name: str, array: np.ndarray) -> StoredArray:
        unique, count = name, 1
        while unique in arrays:  # as with a variable `a:b` and slot `c`, and a variable `a` and slot `b:c`
            unique, count = f"{name}#{count + 1}", count + 1
        arrays[unique] = _bits(name, array)
        return StoredArray(unique, array.dtype.name, array.shape)

    parts = tuple(
        StoredPart(
            part.path,
            part.begin,
            part.end,
            part.rows,
            store(f"value:{part.path}", part.value),
            {name: store(f"slot:{part.path}:{name}", slot) for name, slot in part.slots.items()},
        )
        for part in state.parts
    )
    metadata = Metadata(
        digest=state.digest,
        optimizer=state.optimizer,
        scalars={name: store(f"scalar:{name}", scalar) for name, scalar in state.scalars.items()},
        parts=parts,
        progress=state.progress,
        deals=state.deals,
    )
    # Python's JSON keeps infinity and NaN, as a config may have; msgspec's writes null for them.
    text = json.dumps(msgspec.to_builtins(metadata, str_keys=True))
    arrays["metadata"] = np.frombuffer(text.encode(), np.uint8)
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # Like `np.savez`, but without its copies, which would block the server's other threads.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, np.lib.format.header_data_from_array_1_0(array))
                content = array.reshape(-1).view(np.uint8)
                for position in range(0, content.size, _CHUNK):
                    entry.write(content[position : position + _CHUNK].data)


def describe(path: Path) -> Metadata:
    """Returns the description of a file's arrays.

    Args:
        path: path of the file.

    Raises:
        DamagedError: the file cannot be read, or is not a snapshot.
        SnapshotError: another release of tfdist has written the file, or this user may not read it.
    """
    with _Archive(path) as archive:
        return archive.metadata()


def load(
    path: Path, rows: Sequence[tuple[int, int, int]], with_scalars: bool
) -> tuple[list[PartState], dict[str, np.ndarray]]:
    """Reads arrays of a file, and checks each by its CRC-32. Only the wanted rows are kept in memory.

    Args:
        path: path of the file.
        rows: for each wanted range, the index of its part, and its first row and the row behind its last one, counted
            in the whole variable.
        with_scalars: whether to read the scalars.

    Returns:
        The rows, and the scalars by their names. The arrays own their memory.

    Raises:
        DamagedError: the file cannot be read.
        SnapshotError: a variable cannot be split, another release of tfdist has written the file, or this user may not
            read it.
    """
    with _Archive(path) as archive:
        metadata = archive.metadata()
        parts = [archive.part(metadata.parts[index], begin, end) for index, begin, end in rows]
        scalars = metadata.scalars.items() if with_scalars else ()
        return parts, {name: archive.array(scalar) for name, scalar in scalars}


class _Archive:
    """An open snapshot file. Within its context any error that damage can cause becomes `DamagedError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Archive:
        try:
            self._zip = zipfile.ZipFile(self._path)
        except Exception as error:
            self._translate(error)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._zip.close()
        if isinstance(error, Exception):
            self._translate(error)

    def _translate(self, error: Exception) -> None:
        """Raises the error that the caller gets. A flipped bit may make zipfile or NumPy raise nearly any error."""
        if isinstance(error, PermissionError):
            raise SnapshotError(
                f"the snapshot {self._path} cannot be read: {error.strerror}. Give the user of the parameter servers "
                "the right to read it, or move it away."
            ) from error
        if isinstance(error, SnapshotError | MemoryError):
            raise error
        raise DamagedError(self._path, f"{type(error).__name__}: {error}") from error

    def metadata(self) -> Metadata:
        """Reads the description of the arrays."""
        given = json.loads(self.array(StoredArray("metadata", "uint8", (-1,))).tobytes())
        version = msgspec.convert(given, _Version)
        if version.format != _FORMAT:
            raise ValueError(f"it is of the format {version.format!r}; expected {_FORMAT!r}")
        if version.format_version != _VERSION:
            raise SnapshotError(
                f"the snapshot {self._path} has version {version.format_version} of the format; this release of tfdist "
                f"reads version {_VERSION}. Use the release that wrote it, or another folder."
            )
        return msgspec.convert(given, Metadata, str_keys=True)

    def part(self, part: StoredPart, begin: int, end: int) -> PartState:
        """Reads rows of a part, with their slots."""
        if (begin, end) == (part.begin, part.end):
            rows = None
        else:
            rows = (begin - part.begin, end - part.begin)
            for name, slot in part.slots.items():
                if slot.shape != part.value.shape:
                    raise SnapshotError(
                        f"the variable {part.path!r} of the snapshot {self._path} cannot be split over servers: its "
                        f"slot {name!r} has the shape {slot.shape}, the variable {part.value.shape}. Use as many "
                        "servers as wrote the snapshot, or an optimizer whose slots have their variables' shapes."
                    )
        slots = {name: self.array(slot, rows) for name, slot in part.slots.items()}
        return PartState(part.path, begin, end, part.rows, self.array(part.value, rows), slots)

    def array(self, stored: StoredArray, rows: tuple[int, int] | None = None) -> np.ndarray:
        """Reads an array, or some of its rows.

        Args:
            stored: description of the array; a shape of ``(-1,)`` accepts any number of elements.
            rows: first row, and the row behind the last one; None for all rows. Other rows are read for the checksum.
        """
        dtype = _dtype(stored.dtype)
        info = self._zip.getinfo(f"{stored.name}.npy")
        with self._zip.open(info) as file:
            shape, raw = _header(file)
            nbytes = prod(shape) * raw.itemsize
            # Checked before memory is allocated: a damaged header may announce any size.
            if raw != _raw(dtype) or file.tell() + nbytes != info.file_size or stored.shape not in ((-1,), shape):
                raise ValueError(
                    f"the array {stored.name!r} is {raw} {shape} in {info.file_size} bytes; expected {_raw(dtype)} "
                    f"{stored.shape}"
                )
            if rows is None:
                array, begin, end = np.empty(shape, raw), 0, nbytes
            else:
                array = np.empty((rows[1] - rows[0], *shape[1:]), raw)
                begin, end = (row * raw.itemsize * prod(shape[1:]) for row in rows)
            kept = array.reshape(-1).view(np.uint8)
            position = 0
            while position < nbytes:
                chunk = np.frombuffer(file.read(min(_CHUNK, nbytes - position)), np.uint8)
                if not chunk.size:
                    raise ValueError(f"the array {stored.name!r} is truncated")
                low, high = max(begin, position), min(end, position + chunk.size)
                if low < high:
                    kept[low - begin : high - begin] = chunk[low - position : high - position]
                position += chunk.size
            file.read(1)  # zipfile compares the checksum at the end of the file
        return array.view(dtype)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):  # NumPy writes other versions for structured dtypes and for headers of more than 64 KiB
        raise ValueError(f"version {version} of NumPy's format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if is_fortran:
        raise ValueError("an array in Fortran order")
    return shape, dtype


def _is_plain(dtype: np.dtype) -> bool:
    """Returns whether NumPy's format can hold a dtype: NumPy's own numbers, in the machine's byte order."""
    return dtype.isbuiltin == 1 and dtype.kind in "biufc"


def _raw(dtype: np.dtype) -> np.dtype:
    """Returns the dtype by which the file stores a dtype."""
    return dtype if _is_plain(dtype) else np.dtype(f"u{dtype.itemsize}")


def _bits(name: str, array: np.ndarray) -> np.ndarray:
    array = np.asarray(array, order="C")
    if _is_plain(array.dtype):
        return array
    if getattr(ml_dtypes, array.dtype.name, None) is array.dtype.type:
        return array.view(_raw(array.dtype))
    raise TypeError(f"{name!r} cannot be stored in a snapshot: its dtype is {array.dtype}; expected numbers")


def _dtype(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if not _is_plain(dtype) and getattr(ml_dtypes, name, None) is not dtype.type:
        raise ValueError(f"an array of dtype {name[:40]!r}")
    return dtype
