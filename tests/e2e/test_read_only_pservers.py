"""A job that trains publishes deltas, and read-only pservers, which were started beside it, serve each of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.version import NO_VERSION, Version
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.serving.predictor import Prediction, Predictor
from fleet_sparse.serving.pserver_reader import PserverReader
from fleet_sparse.settings import Settings
from support.jobs import TIMEOUT_S, job, wait_for_line

NUM_VERSIONS = 4


def version_with(reader: PserverReader, number: int) -> Version:
    """Waits until all pservers serve a snapshot."""
    known = reader.newest() or NO_VERSION
    while known.number != number:
        known = reader.await_version(known) or NO_VERSION
    return known


def predicted_with(predictor: Predictor, version: Version, ids: NDArray[np.int64]) -> NDArray[Any]:
    """Predicts until a version is adopted; returns what is predicted with it."""
    for _ in range(10_000):
        prediction = predictor.run({"ids": ids})
        if prediction.version == version:
            (predicted,) = prediction.outputs.values()
            return predicted
    raise AssertionError(predictor.stats)


class Load:
    """Predictions of several threads, from the beginning to the end of a `with` block, with their versions."""

    def __init__(self, predictor: Predictor, feed: dict[str, NDArray[Any]], num_threads: int = 2) -> None:
        self._predictor, self._feed = predictor, feed
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]
        self.found: list[Prediction] = []
        self.errors: list[Exception] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.found.append(self._predictor.run(self._feed))
            except Exception as error:
                self.errors.append(error)


def test_each_delta_of_a_running_job_is_served_exactly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with job("published.py", tmp_path, 1, num_servers=2) as (_, (worker,)):
        wait_for_line(worker, "saved 1$")
        with (
            local_pservers(
                3,
                root=tmp_path,
                load_dirname="serve/rows",
                arguments=["--read-only"],
                environment={"FLEET_SPARSE_VERSION_KEEP_S": "0.1"},
            ) as pservers,
            PserverReader(pservers.endpoints, Settings()) as reader,
            Predictor(str(tmp_path / "serve"), pservers.endpoints, settings=Settings()) as predictor,
            Load(predictor, {"ids": np.load(tmp_path / "truth-1.npz")["ids"].reshape(-1, 4)}) as load,
        ):
            ((name, array),) = reader.arrays.items()
            (weight,) = [segment for segment in array.segments if segment.name == "w"]
            before: bytes | None = None
            for number in range(1, NUM_VERSIONS + 1):
                version = version_with(reader, number)
                with np.load(tmp_path / f"truth-{number}.npz") as truth:
                    reading = reader.read({"items": truth["ids"]}, [name])
                    assert reading.version == version
                    assert reading.rows["items"].tobytes() == truth["rows"].tobytes()
                    values = reading.values[name][weight.offset : weight.offset + weight.size]
                    assert values.tobytes() == truth["dense"].tobytes()
                    assert reading.rows["items"].tobytes() != before
                    before = reading.rows["items"].tobytes()
                    predicted = predicted_with(predictor, version, truth["ids"].reshape(-1, 4))
                    np.testing.assert_allclose(predicted, truth["prediction"], rtol=1e-6, atol=1e-6)
                (tmp_path / "go").write_text("on")
                if number < NUM_VERSIONS:
                    wait_for_line(worker, f"saved {number + 1}$")
        worker.communicate(timeout=TIMEOUT_S)
        assert worker.returncode == 0
    truths = {n: np.load(tmp_path / f"truth-{n}.npz")["prediction"] for n in range(1, NUM_VERSIONS + 1)}
    assert load.errors == []
    assert {each.version.number for each in load.found} == set(truths)
    for outputs, version in load.found:
        (predicted,) = outputs.values()
        np.testing.assert_allclose(predicted, truths[version.number], rtol=1e-6, atol=1e-6)
