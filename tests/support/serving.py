"""A saved model whose series goes on without its job, and predictions under load that are checked bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.version import Version
from fleet_sparse.serving.local_reader import LocalReader
from fleet_sparse.serving.predictor import Predictor
from fleet_sparse.snapshot.reader import open_content

from .snapshots import DenseModel, Model, TableModel, save

Feed = Mapping[str, NDArray[Any]]


class PublishedModel:
    """A model that a job saved; `publish` adds versions to its series, with rows and dense values at random.

    Args:
        directory: Directory of the model.
        ids: Ids that versions change.
        feeds: Feeds whose predictions are known for every version.

    Attributes:
        directory: As given.
        rows: Directory of the snapshots.
        tables: Specs of the tables.
        truth: Bytes of the prediction for each feed, by version.
    """

    def __init__(self, directory: Path, ids: Sequence[int], feeds: Sequence[Feed]) -> None:
        self.directory, self.rows = directory, directory / "rows"
        self.feeds = feeds
        self._ids = ids
        self._rng = np.random.default_rng(0)
        with open_content(str(self.rows)) as content:
            self.tables = [content.table(name).spec for name in content.tables]
            self._dense = [each.spec for each in content.dense.values()]
        self.truth: dict[Version, list[bytes]] = {}
        self._note_truth()

    @property
    def newest(self) -> Version:
        return max(self.truth)

    def publish(self, share: float = 0.3, kind: str = "delta") -> Version:
        """Adds a snapshot that changes this share of the ids, and all dense values."""
        rng, tables = self._rng, []
        for spec in self.tables:
            states = np.zeros((spec.update_rule.num_states, spec.dim), np.float32).tobytes()
            chosen = [id_ for id_ in self._ids if rng.random() < share or kind == "full"]
            rows = {id_: (rng.normal(size=spec.dim).astype(np.float32).tobytes(), states, 0) for id_ in chosen}
            tables.append(TableModel(spec, rows))
        dense = [
            DenseModel(
                spec,
                rng.normal(size=spec.num_values).astype(np.float32),
                np.zeros((spec.update_rule.num_states, spec.num_values), np.float32),
                1,
            )
            for spec in self._dense
        ]
        save(self.rows, Model(tuple(tables), tuple(dense)), 2, kind=kind)
        return self._note_truth()

    def _note_truth(self) -> Version:
        with open_content(str(self.rows)) as content:
            reader = LocalReader(content)
        with Predictor(str(self.directory), reader) as predictor:
            self.truth[reader.version] = [bits_of(predictor.run(feed).outputs) for feed in self.feeds]
        return reader.version


class Answer(NamedTuple):
    """A prediction under load."""

    feed: int
    bits: bytes
    version: Version
    answered_at: float


class Load:
    """Predictions of several threads, from the beginning to the end of a `with` block."""

    def __init__(self, predictor: Predictor, feeds: Sequence[Feed], num_threads: int = 2, pause_s: float = 0.0) -> None:
        self._predictor, self._feeds, self._pause_s = predictor, feeds, pause_s
        self._stop = threading.Event()
        self.answers: list[list[Answer]] = [[] for _ in range(num_threads)]
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=[each]) for each in self.answers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wrong(self, truth: Mapping[Version, Sequence[bytes]]) -> list[Answer]:
        """Returns the answers that are not those of the version that they name."""
        return [each for some in self.answers for each in some if truth[each.version][each.feed] != each.bits]

    def longest_gap_s(self) -> float:
        """Returns the longest time between two answers to the same thread."""
        gaps = [np.diff([each.answered_at for each in some]).max() for some in self.answers]
        return float(max(gaps))

    def _run(self, answers: list[Answer]) -> None:
        rng = np.random.default_rng(len(self.answers))
        while not self._stop.wait(self._pause_s):
            feed = int(rng.integers(len(self._feeds)))
            try:
                outputs, version = self._predictor.run(self._feeds[feed])
            except Exception as error:
                self.errors.append(error)
            else:
                answers.append(Answer(feed, bits_of(outputs), version, time.monotonic()))


def bits_of(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    """Returns the bytes of all outputs."""
    return b"".join(np.ascontiguousarray(each).tobytes() for each in outputs.values())


def read_only_sets(stack: ExitStack, root: Path, num_shards: int, num_sets: int, **variables: str) -> list[Any]:
    """Starts sets of read-only pservers of `serve/rows`; each has one for each shard."""
    from fleet_sparse.local_pservers import local_pservers

    return [
        stack.enter_context(
            local_pservers(
                num_shards,
                root=root,
                load_dirname="serve/rows",
                arguments=["--read-only"],
                environment={"FLEET_SPARSE_VERSION_KEEP_S": "0.2", **variables},
            )
        )
        for _ in range(num_sets)
    ]


def endpoints_of(sets: Sequence[Any]) -> list[str]:
    """Returns the replicas of each shard."""
    return ["|".join(each) for each in zip(*(pservers.endpoints for pservers in sets), strict=True)]
