"""Trains and saves a model, and compares each way to use it outside of its job with the job, also after a delta.

`python -m fleet_sparse.tools.parity.serving` is the worker of a job, whose role is in the environment. It prints one
line of JSON: the largest difference of each way for each version.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.plugin.install import install
from fleet_sparse.serving.exported_rows import RowChoice
from fleet_sparse.serving.model import read_model
from fleet_sparse.serving.paddle_export import export_paddle
from fleet_sparse.serving.paddle_network import predict
from fleet_sparse.serving.predictor import Predictor
from fleet_sparse.serving.self_check import TOLERANCE, difference_of
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.reader import open_content

Feed = dict[str, NDArray[Any]]
Ask = Callable[[Mapping[str, NDArray[Any]]], NDArray[Any]]
"""Predicts a feed."""

MODEL = "serve"
NUM_IDS = 200
SIZES = (1, 2, 513)
"""Sizes of the compared batches."""
_BATCH = 256
_ADOPTED_S = 60.0
_PAUSE_S = 0.01
_KNOWN = np.append(np.arange(NUM_IDS), [-1, -(2**63), 2**63 - 1])
"""Ids of the table of items; those of users are the first `NUM_IDS`. All are trained in the first step."""
_PADDING = 7


class ServingDifference(NamedTuple):
    """How far the predictions of one way are from those of the job."""

    way: str
    version: int
    """Number of the snapshot."""
    kind: str
    """`"full"` or `"delta"`."""
    difference: float | None
    """Largest one, relative to the larger of 1 and the largest prediction; None if the way is not installed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints `{"tolerance": ..., "compared": [{"way": ...}]}`; errors go to standard error."""
    parser = argparse.ArgumentParser(prog="python -m fleet_sparse.tools.parity.serving", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="Directory under which the pservers save.")
    parser.add_argument("--steps", type=int, default=50, help="Number of steps before each save.")
    parser.add_argument("--readers", type=int, default=2, help="Number of read-only pservers.")
    options = parser.parse_args(arguments)
    try:
        install()
        paddle.enable_static()
        compared = [each._asdict() for each in compare(options.root, options.steps, options.readers)]
    except FleetSparseError as error:
        sys.exit(str(error))
    print(json.dumps({"tolerance": TOLERANCE, "compared": compared}))


def compare(root: Path, num_steps: int, num_readers: int) -> Iterator[ServingDifference]:
    """Trains as the only worker of its job, and yields the differences of each way for a full snapshot and a delta."""
    fleet.init()
    prediction, loss = _build()
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    evaluation = paddle.static.default_main_program().clone(for_test=True)
    rng = np.random.default_rng(5)

    def save(mode: int) -> list[tuple[Feed, NDArray[Any]]]:
        for _ in range(num_steps):
            executor.run(feed={**_batch(rng), "label": _labels(rng)}, fetch_list=[loss])
        fleet.save_inference_model(executor, MODEL, ["items", "users"], [prediction], mode=mode)
        feeds = [{name: ids[:size] for name, ids in _batch(rng, max(SIZES)).items()} for size in SIZES]
        return [(feed, predicted(feed)) for feed in feeds]

    def predicted(feed: Feed) -> NDArray[Any]:
        label = np.zeros((len(feed["users"]), 1), np.float32)  # the clone for test has the loss too
        value: NDArray[Any]
        (value,) = executor.run(evaluation, feed={**feed, "label": label}, fetch_list=[prediction])
        return value

    expected = save(0)
    readers = local_pservers(
        num_readers,
        root=root,
        load_dirname=f"{MODEL}/rows",
        arguments=["--read-only"],
        log=subprocess.DEVNULL,
    )
    with readers as pservers, Predictor(str(root / MODEL), pservers.endpoints) as predictor:
        yield from _differences(root, predictor, num_readers, "full", expected)
        yield from _differences(root, predictor, num_readers, "delta", save(1))
    fleet.stop_worker()


def _build() -> tuple[Any, Any]:
    """A shared table with padding and ids computed in the graph, a second table, and ops that oneDNN computes wrong."""

    def lookup(ids: Any, table: str, **more: Any) -> Any:
        attr = paddle.ParamAttr(name=f"serving.{table}", initializer=paddle.nn.initializer.Uniform(-0.1, 0.1))
        return paddle.static.nn.embedding(
            ids, size=[10**11, 8], is_sparse=True, is_distributed=True, param_attr=attr, **more
        )

    items, users = paddle.static.data("items", [-1, 4], "int64"), paddle.static.data("users", [-1, 1], "int64")
    label = paddle.static.data("label", [-1, 1], "float32")
    vectors = [
        lookup(items, "item", padding_idx=_PADDING),
        lookup((users * 7 + 3) % NUM_IDS, "item"),
        lookup(users, "user"),
    ]
    rows = paddle.concat(vectors, axis=1)
    total = paddle.sum(rows, axis=1)
    order_2 = paddle.square(total) - paddle.sum(paddle.square(rows), axis=1)
    hidden = paddle.static.nn.fc(paddle.concat([total, order_2], axis=1), 16, activation="relu")
    logit = paddle.static.nn.fc(paddle.nn.functional.dropout(hidden, 0.1), 1)
    loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
    prediction = paddle.nn.functional.sigmoid(logit)
    fleet.distributed_optimizer(paddle.optimizer.Adam(0.01, lazy_mode=True), fleet.DistributedStrategy()).minimize(loss)
    return prediction, loss


def _batch(rng: np.random.Generator, size: int = _BATCH) -> Feed:
    """A batch that has every id if it is large enough."""
    items = rng.permutation(np.resize(_KNOWN, 4 * size)).reshape(size, 4)
    return {"items": items, "users": rng.permutation(np.resize(np.arange(NUM_IDS), size))[:, None]}


def _labels(rng: np.random.Generator) -> NDArray[np.float32]:
    return rng.integers(0, 2, (_BATCH, 1)).astype(np.float32)


def _differences(
    root: Path, predictor: Predictor, num_readers: int, kind: str, expected: Sequence[tuple[Feed, NDArray[Any]]]
) -> Iterator[ServingDifference]:
    directory = directory_at(root / MODEL)
    model = read_model(directory)
    plain, onnx = root / "plain", root / "onnx"
    with open_content(str(root / MODEL / "rows")) as content:
        export_paddle(directory, model, content, plain, RowChoice())
    _await_version(predictor, model.number, expected[0][0])
    readers = f"Predictor on {num_readers} pserver{'s' if num_readers > 1 else ''}"
    ways: dict[str, Ask | None] = {
        "plain model": lambda feed: predict(plain / "model", feed)[0],
        "plain model, oneDNN off": lambda feed: predict(plain / "model", feed, has_onednn=False)[0],
        "ONNX model": None,
        readers: lambda feed: next(iter(predictor.run(feed).outputs.values())),
    }
    if all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "paddle2onnx")):
        from fleet_sparse.serving.onnx_export import export_onnx, run_onnx

        with open_content(str(root / MODEL / "rows")) as content:
            export_onnx(directory, model, content, onnx, RowChoice())
        ways["ONNX model"] = lambda feed: run_onnx(onnx / "model.onnx", feed)[0]
    for way, ask in ways.items():
        difference = None if ask is None else max(difference_of(ask(feed), wanted) for feed, wanted in expected)
        yield ServingDifference(way, model.number, kind, difference)


def _await_version(predictor: Predictor, number: int, feed: Feed) -> None:
    deadline = time.monotonic() + _ADOPTED_S
    while predictor.run(feed).version.number != number:
        if time.monotonic() > deadline:
            raise FleetSparseError(f"parity: version {number} was not adopted in {_ADOPTED_S:g} s: {predictor.stats()}")
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
