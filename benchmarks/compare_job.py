"""A training script for one side of `benchmarks.compare`: uses Paddle and fleet_sparse as users do, and nothing else.

Its role comes from fleetrun's environment. A worker prints the path of fleet_sparse once it is ready; then it reads
numbers of steps and answers each with the seconds of these steps. Its lines are `@@` and JSON: Paddle prints others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet

import fleet_sparse

sys.path.append(str(Path(__file__).parent / "baselines"))
from zipf import sampler

NUM_FIELDS, DIM, BATCH, NUM_DENSE = 26, 16, 512, 13
HIDDEN = (400, 400, 400)
LEARNING_RATE = 0.01


def feeds(num_batches: int, model: str) -> list[dict[str, Any]]:
    """Returns the batches that are fed again and again."""
    rng, ranks_of = np.random.default_rng(0), sampler()
    made = []
    for _ in range(num_batches):
        ids = 1 + ranks_of(rng, (BATCH, NUM_FIELDS)) * NUM_FIELDS + np.arange(NUM_FIELDS)
        made.append({"ids": ids, "label": (rng.random((BATCH, 1)) < 0.3).astype(np.float32)})
        if model == "step":
            made[-1]["dense"] = rng.random((BATCH, NUM_DENSE), np.float32)
    return made


def build(model: str) -> Any:
    """Returns the loss of the click model, `step`, or of the model that only looks up, `lookup`."""
    ids, label = paddle.static.data("ids", [-1, NUM_FIELDS], "int64"), paddle.static.data("label", [-1, 1], "float32")
    rows = paddle.static.nn.embedding(ids, [10**9, DIM], is_sparse=True, is_distributed=True)
    hidden = paddle.reshape(rows, [-1, NUM_FIELDS * DIM])
    if model == "step":
        hidden = paddle.concat([hidden, paddle.static.data("dense", [-1, NUM_DENSE], "float32")], axis=1)
        for width in HIDDEN:
            hidden = paddle.nn.functional.relu(paddle.nn.Linear(int(hidden.shape[-1]), width)(hidden))
        logit = paddle.nn.Linear(HIDDEN[-1], 1)(hidden)
    else:
        logit = paddle.sum(hidden, axis=1, keepdim=True)
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)


def main() -> None:
    """Serves a shard, or trains as many steps as it is asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("step", "lookup"), required=True)
    parser.add_argument("--mode", choices=("async", "sync"), required=True)
    parser.add_argument("--batches", type=int, required=True)
    options = parser.parse_args()
    fleet_sparse.install()
    paddle.enable_static()
    fleet.init()
    loss = build(options.model)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = options.mode == "async"
    fleet.distributed_optimizer(paddle.optimizer.Adagrad(LEARNING_RATE), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    print("@@" + json.dumps(fleet_sparse.__file__), flush=True)
    batches, number = feeds(options.batches, options.model), 0
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begun_at = time.perf_counter()
            executor.run(feed=batches[number % len(batches)], fetch_list=[loss])
            seconds.append(time.perf_counter() - begun_at)
            number += 1
        print("@@" + json.dumps(seconds), flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
