"""Predictor: predicts with a saved model, whose rows and dense values come from its read-only pservers."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.version import NO_VERSION, Version
from fleet_sparse.errors import ErrorCode, FleetSparseError, PlanError, ProtocolError, ShardUnavailable, TableMismatch
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import directory_at

from .feeds import check_bounds, checked_feed
from .local_reader import LocalReader
from .model import IDS, NETWORK, read_model
from .paddle_export import copy_files
from .paddle_network import OpenNetwork, save_values, values_of
from .pserver_reader import PserverReader

_log = logging.getLogger(__name__)

_PAUSE_S = 0.05
_RETRY_S = 1.0
_MAX_TRIES = 10


class Prediction(NamedTuple):
    """What a model predicts."""

    outputs: dict[str, NDArray[Any]]
    """By name of the target."""
    version: Version
    """The version that all rows and dense values are of."""


@dataclass(frozen=True, slots=True)
class PredictorStats:
    """What a predictor did so far.

    Attributes:
        version: The version that it predicts with.
        num_predictions: Number of predictions.
        num_restarts: Number of times that a prediction began again, because its version was gone.
        num_adopted: Number of versions that it adopted, the first included.
        num_failed: Number of tries to adopt one that failed.
        last_failure: Why the newest version is not used; empty if it is.
    """

    version: Version = NO_VERSION
    num_predictions: int = 0
    num_restarts: int = 0
    num_adopted: int = 0
    num_failed: int = 0
    last_failure: str = ""


class _Adopted(NamedTuple):
    """A version with the network that has its dense values."""

    version: Version
    network: OpenNetwork


class Predictor:
    """Predicts with the newest version that all pservers have; it goes over to newer ones by itself.

    An answer is of one version: rows are read of the version whose dense values its network has. Safe to use from
    several threads; one prediction is computed at a time, without oneDNN.

    Args:
        model: Path or URL of a directory that `fleet.save_inference_model` wrote.
        pservers: `host:port` of the control plane of a read-only pserver for each shard, in their order.
        settings: Timeouts and limits; None for those of the environment.
        reader: A version that is held inside the process, in place of `pservers`; `close` closes it.

    Raises:
        PlanError: The model has no split network, or a pserver trains.
        SnapshotError: The model cannot be read.
        TableMismatch: The pservers serve another model.
        ShardUnavailable: A pserver is not there, or they have no version in common.
    """

    def __init__(
        self,
        model: str,
        pservers: Sequence[str] = (),
        *,
        settings: Settings | None = None,
        reader: LocalReader | None = None,
    ) -> None:
        directory = directory_at(model)
        self._model = read_model(directory)
        if not self._model.is_split:
            raise PlanError(
                f"Predictor {model!r}: ids are computed from rows, so that there is no split network. Export it with "
                "--format paddle"
            )
        self._stats = PredictorStats()
        self._running = threading.Lock()  # held while a network computes
        self._adopting = threading.Lock()
        self._stopping = threading.Event()
        with ExitStack() as undo:
            self._local = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="fleet_sparse")))
            copy_files(directory, self._model, NETWORK, self._local)
            self._values = values_of(self._local / NETWORK)
            self._ids = OpenNetwork(self._local / IDS, has_onednn=False) if self._model.computed else None
            self._reader = PserverReader(pservers, settings) if reader is None else reader
            undo.callback(self._reader.close)
            self._check_model()
            version = self._reader.newest()
            if version is None:
                raise ShardUnavailable(
                    "Predictor: the pservers have no version in common", shard=0, endpoint=pservers[0]
                )
            self._adopted = self._adopt(version)
            self._undo = undo.pop_all()
        self._thread = threading.Thread(target=self._follow, name="predictor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        self._stopping.set()
        self._reader.close()  # ends the call that waits for a version
        self._thread.join()
        self._undo.close()

    @property
    def stats(self) -> PredictorStats:
        """What it did so far."""
        return replace(self._stats, version=self._adopted.version)

    def run(self, feed: Mapping[str, Any]) -> Prediction:
        """Predicts.

        Args:
            feed: The inputs of the model by name, with any number of examples.

        Raises:
            ValueError: An input is wrong; see `checked_feed`. Nothing was asked.
            ShardUnavailable: Pservers do not answer within `settings.deadline_s`.
        """
        arrays = checked_feed(self._model, feed)
        for _ in range(_MAX_TRIES):
            adopted = self._adopted
            try:
                outputs = self._run(adopted, arrays)
            except ProtocolError as error:
                if error.code is not ErrorCode.VERSION_GONE:
                    raise
                self._stats = replace(self._stats, num_restarts=self._stats.num_restarts + 1)
                self._adopt_newest(adopted.version)
                continue
            self._stats = replace(self._stats, num_predictions=self._stats.num_predictions + 1)
            return Prediction(outputs, adopted.version)
        raise FleetSparseError(
            f"Predictor: {_MAX_TRIES} versions were gone before their rows were read. Set FLEET_SPARSE_VERSION_KEEP_S "
            "of the pservers higher"
        )

    def _run(self, adopted: _Adopted, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        ids_of = self._ids_of(feed)
        wanted: dict[str, list[NDArray[np.int64]]] = {}
        for lookup, ids in zip(self._model.lookups, ids_of, strict=True):
            wanted.setdefault(lookup.table, []).append(ids.reshape(-1))
        unique = {name: np.unique(np.concatenate(each)) for name, each in wanted.items()}
        reading = self._reader.read(unique, version=adopted.version)
        inputs: dict[str, NDArray[Any]] = dict(feed)
        for name, rows in reading.rows.items():
            inputs[f"{name}@rows"] = np.concatenate([rows, np.zeros((1, rows.shape[1]), np.float32)])
        for number, (lookup, ids) in enumerate(zip(self._model.lookups, ids_of, strict=True)):
            known = unique[lookup.table]
            index = np.searchsorted(known, ids)
            if lookup.padding_idx is not None:
                index[ids == lookup.padding_idx] = len(known)  # the row of zeros
            inputs[f"{lookup.table}@index.{number}"] = index
        with self._running:
            results = adopted.network.run(inputs)
        return {target.name: result for target, result in zip(self._model.targets, results, strict=True)}

    def _ids_of(self, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[np.int64]]:
        """Returns the ids of each lookup."""
        computed: dict[int, NDArray[Any]] = {}
        if self._ids is not None:
            with self._running:
                computed = dict(zip(self._model.computed, self._ids.run(feed), strict=True))
        found = []
        for number, lookup in enumerate(self._model.lookups):
            ids = computed[number] if lookup.feed is None else feed[lookup.feed]
            if lookup.feed is None and lookup.size is not None:
                check_bounds(f"lookup {number} in table {lookup.table!r}", ids, lookup.size)
            found.append(ids.astype(np.int64, copy=False))
        return found

    def _check_model(self) -> None:
        for table in self._model.tables:
            ours, theirs = parse_spec(json.dumps(table.spec)), self._reader.tables.get(table.name)
            differences = ["it is missing"] if theirs is None else ours.differences(theirs)
            if differences:
                raise TableMismatch(
                    f"table {table.name!r}: the model and the pservers describe it differently: "
                    f"{', '.join(differences)}. Give the pservers of the model"
                )
        for array in self._model.dense:
            if array.array not in self._reader.arrays:
                raise TableMismatch(
                    f"dense {array.array!r}: the pservers do not have it. Give the pservers of the model"
                )

    def _adopt(self, version: Version) -> _Adopted:
        """Opens the network with the dense values of a version."""
        values = dict(self._values)
        for array in self._model.dense:
            try:
                reading = self._reader.read({}, [array.array], version=version)
            except ProtocolError as error:
                if error.code is not ErrorCode.NOT_READY:
                    raise
                continue  # no version has values of it
            for each in array.parameters:
                size = int(np.prod(each.shape, dtype=np.int64))
                values[each.name] = reading.values[array.array][each.offset : each.offset + size].reshape(each.shape)
        file = self._local / f"{version.checksum:016x}.pdiparams"
        save_values(file, values)
        network = OpenNetwork(self._local / NETWORK, file, has_onednn=False)
        file.unlink()
        self._stats = replace(self._stats, num_adopted=self._stats.num_adopted + 1, last_failure="")
        return _Adopted(version, network)

    def _adopt_newest(self, known: Version) -> None:
        """Adopts the newest version in place of `known`, unless another thread has."""
        with self._adopting:
            if self._adopted.version != known:
                return
            version = self._reader.newest()
            if version is not None and version != known:
                self._adopted = self._adopt(version)

    def _follow(self) -> None:
        while not self._stopping.is_set():
            known = self._adopted.version
            try:
                version = self._reader.await_version(known)
                if version is None:
                    self._stopping.wait(_PAUSE_S)
                elif version != known:
                    self._adopt_newest(known)
            except Exception as error:
                if self._stopping.is_set():
                    return
                text = f"{type(error).__name__}: {error}"
                if text != self._stats.last_failure:
                    _log.warning("the newest version is not used: %s", text)
                self._stats = replace(self._stats, num_failed=self._stats.num_failed + 1, last_failure=text)
                self._stopping.wait(_RETRY_S)
