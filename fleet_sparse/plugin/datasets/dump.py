"""FieldsDump: writes values of each example of a run over a data set to a file, as Paddle's trainers do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fleet_sparse.errors import PlanError

_REMOTE = ("hdfs:", "afs:", "viewfs:")


class FieldsDump:
    """A file with a line for each example: `<tab>name:count:value:value` for each field.

    Paddle begins a line with the id of the example, which is left out here.

    Args:
        fields: Names of values that have a row for each example.
        directory: Is made if it does not exist; the file in it is `part-<worker>-00000`.
        worker: Index of this worker.
    """

    def __init__(self, fields: Sequence[str], directory: Path, worker: int) -> None:
        self.fields = list(fields)
        self._path = directory / f"part-{worker:05}-00000"
        self._writing = threading.Lock()  # guards the file: several threads may train
        self._file: IO[str] | None = None

    def write(self, num_examples: int, values: Sequence[Any]) -> None:
        """Writes the fetched values of the fields in one batch.

        Raises:
            PlanError: A value does not have a row for each example.
        """
        texts = []
        for name, value in zip(self.fields, values, strict=True):
            array = np.asarray(value)
            if array.ndim == 0 or len(array) != num_examples:
                raise PlanError(
                    f"dump_fields: {name!r} has shape {list(array.shape)} in a batch of {num_examples} examples, "
                    "should have a row for each. Leave it out"
                )
            rows = array.reshape(num_examples, -1).tolist()
            texts.append([f"\t{name}:{len(row)}:" + ":".join(f"{number:.7g}" for number in row) for row in rows])
        with self._writing:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("w", encoding="utf-8")
            self._file.writelines("".join(parts) + "\n" for parts in zip(*texts, strict=True))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def dump_of(
    caller: str, options: Mapping[str, Any], worker: int, has_value: Callable[[str], bool]
) -> FieldsDump | None:
    """Returns what `dump_fields` and `dump_fields_path` of a program's `_fleet_opt` ask for; None for nothing.

    Args:
        caller: Name of the call, for messages.
        options: The options of the program.
        worker: Index of this worker.
        has_value: Returns whether the program has a value of a name.

    Raises:
        PlanError: There is no directory, it is remote, or the program has no value of a name.
    """
    fields, path = options.get("dump_fields") or [], str(options.get("dump_fields_path") or "")
    if not fields:
        return None
    if not path or path.startswith(_REMOTE):
        raise PlanError(f"{caller}: dump_fields_path is {path!r}, should be a directory of this machine")
    for name in fields:
        if not has_value(name):
            raise PlanError(
                f"{caller}: dump_fields has {name!r}, and the program has no value with this name. Give the name of an "
                "input, or value.name of what a layer returned"
            )
    return FieldsDump(fields, Path(path), worker)
