"""Feeds and answers as files of NumPy."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import SettingError

WRONG_NPZ = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,  # an unknown compression
    RuntimeError,  # encrypted
    MemoryError,  # a header with a shape that is too large
)
"""What NumPy and zipfile raise for a file that is no `.npz` file of arrays, or is damaged."""


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a file by name.

    Raises:
        SettingError: It cannot be read, is no `.npz` file, is damaged, or has objects in it.
    """
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no .npz file")
            file.seek(0)
            opened = np.load(file, allow_pickle=False)
            return {name: opened[name] for name in opened.files}
    except WRONG_NPZ as error:
        raise SettingError(f"{path}: cannot be read: {_reason(error)}. It should be a file of numpy.savez") from error


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes arrays by name. Unlike of `numpy.savez`, every name is allowed, and the path stays as it is.

    Raises:
        SettingError: The file cannot be written.
    """
    try:
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    except OSError as error:
        raise SettingError(f"{path}: cannot be written: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Without the path, which the message begins with."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
