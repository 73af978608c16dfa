"""Predictor: predicts with a saved model and the rows and dense values of one version of it."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.initializer import initial_rows, mean_of
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import NO_VERSION, Version
from fleet_sparse.errors import ErrorCode, PlanError, ProtocolError, SettingError, ShardUnavailable, TableMismatch
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import Directory, directory_at
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.rows.deduplicator import Deduplicator, LookupGroup, TableLookups

from .feeds import check_bounds, checked_feed
from .model import IDS, NETWORK, ServedModel, read_model
from .paddle_export import copy_files, examples_of
from .paddle_network import Arrays, OpenNetwork, save_values, values_of
from .pserver_reader import PserverReader
from .row_cache import RowCache
from .row_reader import RowReader, differences_of_reads
from .series_reader import SeriesReader

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOOK_S = 1.0  # between two looks at how long a newer version waits

Engine = Literal["paddle", "onnxruntime"]
Unseen = Literal["initial", "mean", "zeros"]


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
        leading: The newest version that was seen.
        lag_s: Seconds since it was seen first if it is not the one that is used; else 0.
        num_predictions: Number of predictions.
        num_restarts: Number of times that a prediction began again, because its version was gone.
        num_hits: Number of distinct ids of predictions whose row was in the cache.
        num_misses: Number of those whose row was read; 0 without a cache.
        num_failovers: Number of tries that went to another replica.
        num_adopted: Number of versions that it adopted, the first included.
        num_failed: Number of tries to adopt one that failed.
        last_failure: Why the newest version is not used; empty if it is.
        problems: Why pservers are not used, or cannot adopt the snapshot that should be served, one text for each of
            them.
    """

    version: Version = NO_VERSION
    leading: Version = NO_VERSION
    lag_s: float = 0.0
    num_predictions: int = 0
    num_restarts: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_failovers: int = 0
    num_adopted: int = 0
    num_failed: int = 0
    last_failure: str = ""
    problems: tuple[str, ...] = ()


class Network(Protocol):
    """A network that was opened with the values of a version."""

    def run(self, feed: Arrays) -> list[NDArray[Any]]: ...


class _Adopted(NamedTuple):
    """A version with the network that has its dense values."""

    version: Version
    network: Network | None
    """None before the first version."""


class Predictor:
    """Predicts with one version of a model, and goes over to newer versions by itself.

    An answer is of one version: rows are read of the version whose dense values its network has. Safe to use from
    several threads; with the engine `paddle`, which holds the GIL, one prediction is computed at a time.

    Args:
        model: Path or URL of a directory that `fleet.save_inference_model` wrote.
        pservers: For each shard in order `host:port` of the control plane of its read-only pserver, or of several with
            `|` between them; or one string with commas between shards. None to hold rows and dense values of the
            snapshot in `model` that readers serve in this process. Or a reader, which `close` closes.
        cache_rows: Number of rows of each table that are kept, of the version that is used; 0 for none. It has no
            effect without pservers.
        engine: What computes the network: `paddle`, without oneDNN, or `onnxruntime` (extra `fleet-sparse[onnx]`).
        unseen: What an id without a row reads: its `initial` value, as in training, the `mean` of the initializer, or
            `zeros`. Every row that is bit for bit its initial value counts as none.
        settings: Timeouts and limits; None for those of the environment.

    Raises:
        PlanError: The model has no split network, or a pserver trains.
        SnapshotError: The model or its rows cannot be read.
        TableMismatch: The rows are those of another model.
        ShardUnavailable: No pserver of a shard is there, or the shards have no version in common.
        SettingError: An argument is none of these values, or the pservers are not those of all shards, in order.
        ModuleNotFoundError: A package of the engine is not installed.
    """

    def __init__(
        self,
        model: str,
        pservers: str | Sequence[str] | RowReader | None = None,
        cache_rows: int = 0,
        engine: Engine = "paddle",
        unseen: Unseen = "initial",
        *,
        settings: Settings | None = None,
    ) -> None:
        for name, value, allowed in (("engine", engine, Engine), ("unseen", unseen, Unseen)):
            if value not in get_args(allowed):
                raise SettingError(f"Predictor: {name} is {value!r}, should be one of {', '.join(get_args(allowed))}")
        if cache_rows < 0:
            raise SettingError(f"Predictor: cache_rows is {cache_rows}, should be 0 or more")
        self._settings = Settings.from_environment() if settings is None else settings
        self._unseen = unseen
        directory = directory_at(model)
        self._model = read_model(directory)
        if not self._model.is_split:
            raise PlanError(
                f"Predictor {model!r}: ids are computed from rows, so that there is no split network. Export it with "
                "--format paddle"
            )
        warm_up()
        self._adopting = threading.Lock()
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards the three that follow, each for a moment
        self._stats = PredictorStats()
        self._cache: RowCache | None = None
        self._adopted = _Adopted(NO_VERSION, None)
        self._behind_since: float | None = None
        with ExitStack() as undo:
            self._local = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="fleet_sparse")))
            copy_files(directory, self._model, NETWORK, self._local)
            self._values = values_of(self._local / NETWORK)
            self._computing, self._open, self._ids = self._opened(engine)
            names = [table.name for table in self._model.tables]
            self._reader = self._reader_of(pservers, directory.child(self._model.rows), names)
            undo.callback(self._reader.close)
            check_rows(self._model, self._reader.tables, self._reader.arrays)
            self._specs = {name: self._reader.tables[name] for name in names}
            self._place_lookups()
            if cache_rows and isinstance(self._reader, PserverReader):
                self._cache = RowCache(self._specs.values(), cache_rows)
            self._adopt(NO_VERSION, self._first_version())
            self._undo = undo.pop_all()
        self._thread = threading.Thread(target=self._follow, name="predictor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections. A second call does nothing."""
        self._stopping.set()
        self._reader.close()  # ends the call that waits for a version
        self._thread.join()
        self._undo.close()

    def stats(self) -> PredictorStats:
        """Returns what it did so far."""
        self._note_lag()
        with self._lock:
            cache = self._cache
            return replace(
                self._stats,
                version=self._adopted.version,
                leading=max(self._reader.leading or NO_VERSION, self._adopted.version),
                lag_s=0.0 if self._behind_since is None else time.monotonic() - self._behind_since,
                num_hits=0 if cache is None else cache.num_hits,
                num_misses=0 if cache is None else cache.num_misses,
                num_failovers=self._reader.num_failovers,
                problems=tuple(self._reader.problems),
            )

    def run(self, feed: Mapping[str, Any]) -> Prediction:
        """Predicts.

        Args:
            feed: The inputs of the model by name, with any number of examples.

        Raises:
            ValueError: An input is wrong; see `checked_feed`. Nothing was asked.
            ShardUnavailable: Pservers do not answer, or have no version in common, within `settings.deadline_s`.
        """
        arrays = checked_feed(self._model, feed)
        inputs, unique = self._inputs_of(arrays)
        deadline = time.monotonic() + self._settings.deadline_s
        while True:
            version = NO_VERSION
            try:
                with self._lock:  # the version and the cached rows are of one moment
                    version, network = self._adopted
                    looked_up = None if self._cache is None else self._cache.look_up(unique)
                for name, rows in self._rows_of(version, unique, looked_up, deadline).items():
                    inputs[f"{name}@rows"] = np.concatenate([rows, np.zeros((1, rows.shape[1]), np.float32)])
                assert network is not None, "the first version was adopted"
                with self._computing:
                    results = network.run(inputs)
                with self._lock:
                    self._stats = replace(self._stats, num_predictions=self._stats.num_predictions + 1)
                names = [target.name for target in self._model.targets]
                return Prediction(dict(zip(names, results, strict=True)), version)
            except ProtocolError as error:
                if error.code is not ErrorCode.VERSION_GONE:
                    raise
            self._begin_again(version, deadline)

    def _begin_again(self, gone: Version, deadline: float) -> None:
        """Adopts another version than one that is gone, or waits until it is there again."""
        with self._lock:
            self._stats = replace(self._stats, num_restarts=self._stats.num_restarts + 1)
        try:
            self._adopt(gone, self._reader.await_usable(gone, deadline), deadline)
        except ProtocolError as error:
            if error.code is not ErrorCode.VERSION_GONE:
                raise
        if time.monotonic() >= deadline:
            raise ShardUnavailable(
                f"Predictor: every version was gone before its rows were read, for {self._settings.deadline_s:g} s. "
                "Set FLEET_SPARSE_VERSION_KEEP_S of the pservers higher",
                shard=0,
                endpoint="",
            )

    def _rows_of(
        self,
        version: Version,
        unique: Mapping[str, NDArray[np.int64]],
        looked_up: tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.int64]]] | None,
        deadline: float,
    ) -> dict[str, NDArray[np.float32]]:
        """Returns the rows of distinct ids of a version, the cached ones and those that are read."""
        if looked_up is None:
            read = self._reader.read(unique, version=version, deadline=deadline).rows
            return {name: self._seen(name, unique[name], rows) for name, rows in read.items()}
        rows, missing = looked_up
        ids = {name: unique[name][places] for name, places in missing.items() if places.size}
        if ids:
            read = self._reader.read(ids, version=version, deadline=deadline).rows
            for name, each in read.items():
                read[name] = rows[name][missing[name]] = self._seen(name, ids[name], each)
            with self._lock:
                assert self._cache is not None, "it was looked up"
                for name, each in read.items():
                    self._cache.insert(version, name, ids[name], each)
        return rows

    def _seen(self, name: str, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns rows as `unseen` asks for those of ids without one."""
        if self._unseen == "initial":
            return rows
        spec = self._specs[name]
        first = initial_rows(spec.read_initializer, ids, dim=spec.dim, seed=spec.seed, salt=spec.salt)
        is_unseen = (rows.view(np.uint32) == first.view(np.uint32)).all(axis=1)
        rows[is_unseen] = mean_of(spec.read_initializer) if self._unseen == "mean" else 0.0
        return rows

    def _reader_of(
        self, pservers: str | Sequence[str] | RowReader | None, rows: Directory, tables: Sequence[str]
    ) -> RowReader:
        """Returns where rows and dense values come from."""
        if pservers is None:
            return SeriesReader(rows, tables)
        return PserverReader(pservers, self._settings) if isinstance(pservers, (str, Sequence)) else pservers

    def _place_lookups(self) -> None:
        """Prepares to find the distinct ids of each table, for pservers in the order of their shards."""
        num_shards = self._reader.num_shards if isinstance(self._reader, PserverReader) else 1
        self._deduplicator = Deduplicator(Placement.even(num_shards))
        of_table: dict[str, list[int]] = {name: [] for name in self._specs}
        for number, lookup in enumerate(self._model.lookups):
            of_table[lookup.table].append(number)
        self._order = [number for numbers in of_table.values() for number in numbers]
        self._group = LookupGroup(
            [
                TableLookups(
                    name,
                    np.uint64(self._specs[name].salt),
                    tuple(self._model.lookups[number].padding_idx for number in numbers),
                )
                for name, numbers in of_table.items()
            ]
        )

    def _inputs_of(
        self, feed: Mapping[str, NDArray[Any]]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.int64]]]:
        """Returns the inputs of the network but for the rows, and the distinct ids of each table."""
        ids_of = self._ids_of(feed)
        inputs: dict[str, NDArray[Any]] = dict(feed)
        positions = []
        for number in self._order:
            positions.append(np.empty(ids_of[number].shape, np.int64))
            inputs[f"{self._model.lookups[number].table}@index.{number}"] = positions[-1]
        unique = self._deduplicator.place_tables(self._group, [ids_of[number] for number in self._order], positions)
        return inputs, {name: each.ids for name, each in zip(self._specs, unique, strict=True)}

    def _ids_of(self, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the ids of each lookup."""
        computed: dict[int, NDArray[Any]] = {}
        if self._ids is not None:
            with self._computing:
                computed = dict(zip(self._model.computed, self._ids.run(feed), strict=True))
        found = []
        for number, lookup in enumerate(self._model.lookups):
            ids = computed[number] if lookup.feed is None else feed[lookup.feed]
            if lookup.feed is None and lookup.size is not None:
                check_bounds(f"lookup {number} in table {lookup.table!r}", ids, lookup.size)
            found.append(ids)
        return found

    def _opened(
        self, engine: Engine
    ) -> tuple[AbstractContextManager[Any], Callable[[Version, Arrays], Network], Network | None]:
        """Returns what guards the computing, what opens the network of a version, and the network of ids."""
        has_ids = bool(self._model.computed)
        if engine == "paddle":
            ids = OpenNetwork(self._local / IDS, has_onednn=False) if has_ids else None
            return threading.Lock(), self._open_paddle, ids
        from .onnx_network import OnnxNetworks

        networks = OnnxNetworks(self._local / NETWORK)
        of_ids = OnnxNetworks(self._local / IDS).open({}) if has_ids else None
        return nullcontext(), lambda version, values: networks.open(values), of_ids

    def _open_paddle(self, version: Version, values: Arrays) -> Network:
        file = self._local / f"{version.checksum:016x}.pdiparams"
        save_values(file, values)
        network = OpenNetwork(self._local / NETWORK, file, has_onednn=False)
        file.unlink()
        return network

    def _first_version(self) -> Version:
        deadline = time.monotonic() + self._settings.deadline_s
        version = self._reader.newest()
        return self._reader.await_usable(NO_VERSION, deadline) if version is None else version

    def _adopt(self, known: Version, version: Version, deadline: float | None = None) -> None:
        """Adopts a version in place of `known`, unless another thread did; a network with its values is opened."""
        with self._adopting:
            if version == known or self._adopted.version != known:
                return
            network = self._network_of(version, deadline)
            changed = None
            if self._cache is not None and known != NO_VERSION:
                changed = self._reader.changed(version, known)
            with self._lock:
                self._adopted = _Adopted(version, network)
                if self._cache is not None:
                    self._cache.switch(version, changed)
                self._stats = replace(self._stats, num_adopted=self._stats.num_adopted + 1, last_failure="")
        log = _log.info if version.number >= known.number else _log.warning
        former = "" if known == NO_VERSION else f" in place of {known.number}"
        log("predicts with snapshot %d (%016x)%s", version.number, version.checksum, former)

    def _network_of(self, version: Version, deadline: float | None) -> Network:
        """Opens the network with the dense values of a version, and computes once with it."""
        values = dict(self._values)
        for array in self._model.dense:
            try:
                reading = self._reader.read({}, [array.array], version=version, deadline=deadline)
            except ProtocolError as error:
                if error.code is not ErrorCode.NOT_READY:
                    raise
                continue  # no version has values of it
            for each in array.parameters:
                size = int(np.prod(each.shape, dtype=np.int64))
                values[each.name] = reading.values[array.array][each.offset : each.offset + size].reshape(each.shape)
        network = self._open(version, values)
        inputs, unique = self._inputs_of(examples_of(self._local))  # the first run of a network takes longer
        for name, ids in unique.items():
            inputs[f"{name}@rows"] = np.zeros((len(ids) + 1, self._specs[name].dim), np.float32)
        network.run(inputs)
        return network

    def _follow(self) -> None:
        while not self._stopping.is_set():
            known = self._adopted.version
            try:
                version = self._reader.await_version(known, _LOOK_S)
                self._adopt(known, version)
                if version == known:
                    self._forget_failure()  # what failed is not there any more
                self._note_lag()
            except Exception as error:
                if self._stopping.is_set():
                    return
                self._note_failure(error)
                self._stopping.wait(_RETRY_S)

    def _forget_failure(self) -> None:
        if self._stats.last_failure:
            with self._lock:
                self._stats = replace(self._stats, last_failure="")

    def _note_failure(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self._stats.last_failure:
            _log.warning("the newest version is not used: %s", text)
        with self._lock:
            self._stats = replace(self._stats, num_failed=self._stats.num_failed + 1, last_failure=text)
        self._note_lag()

    def _note_lag(self) -> None:
        """Notes since when a newer version was seen than the one that is used."""
        leading = self._reader.leading
        with self._lock:
            if leading is None or leading.number <= self._adopted.version.number:
                self._behind_since = None
            elif self._behind_since is None:
                self._behind_since = time.monotonic()


def check_rows(model: ServedModel, tables: Mapping[str, TableSpec], arrays: Mapping[str, DenseSpec]) -> None:
    """Checks that rows and dense values are those of a model; rules and hyperparameters may differ.

    Args:
        model: The model.
        tables: Specs of the tables that can be read, by name.
        arrays: Specs of the dense arrays, by name.

    Raises:
        TableMismatch: A table or a parameter is missing, or another one; the message has the differences.
    """
    for table in model.tables:
        ours, theirs = parse_spec(json.dumps(table.spec)), tables.get(table.name)
        differences = ["it is missing"] if theirs is None else differences_of_reads(ours, theirs)
        if differences:
            raise TableMismatch(
                f"table {table.name!r}: the model and the rows describe it differently: {', '.join(differences)}. "
                "Give the pservers of the model"
            )
    for array in model.dense:
        spec = arrays.get(array.array)
        places = set() if spec is None else {(each.name, each.offset, each.size) for each in spec.segments}
        for each in array.parameters:
            size = int(np.prod(each.shape, dtype=np.int64))
            if (each.name, each.offset, size) not in places:
                raise TableMismatch(
                    f"dense {array.array!r}: the pservers do not have parameter {each.name!r} with {size} values "
                    f"at {each.offset}. Give the pservers of the model"
                )
