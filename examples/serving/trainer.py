"""The job of the demo: trains DeepFM on flights, saves a model, and publishes a delta every two seconds.

It prints `published <number>` after each save. When its standard input ends it saves the model once more and stops.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time

import paddle
from paddle.distributed import fleet

import fleet_sparse
from fleet_sparse.models import flights
from fleet_sparse.models.deepfm import deepfm
from fleet_sparse.models.embedding import distributed

BATCH_SIZE, NUM_FIRST_STEPS, NUM_STEPS, PERIOD_S = 256, 60, 30, 2.0

fleet_sparse.install()
paddle.enable_static()
paddle.seed(1)
fleet.init()


def prediction() -> paddle.pir.Value:
    """The chance that a flight is late."""
    ids = paddle.static.data("ids", [None, len(flights.FIELDS)], "int64")
    dense = paddle.static.data("dense", [None, len(flights.DENSE)], "float32")
    num_fields = len(flights.FIELDS)
    logits = deepfm(ids, dense, embedding=distributed, num_fields=num_fields, dim=8, hidden=(64, 32))
    return paddle.nn.functional.sigmoid(logits)


prob = prediction()
label = paddle.static.data("label", [None, 1], "float32")
loss = paddle.nn.functional.binary_cross_entropy(prob, label)
fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.05), fleet.DistributedStrategy()).minimize(loss)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()

source = flights.source(batch_size=BATCH_SIZE, seed=1)
batches = itertools.chain.from_iterable(source.train(epoch, 0, 1) for epoch in itertools.count())
is_stopped = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), is_stopped.set()), daemon=True).start()


def train(num_steps: int) -> None:
    """Trains some steps."""
    for batch in itertools.islice(batches, num_steps):
        exe.run(feed={"ids": batch.ids, "dense": batch.dense, "label": batch.label}, fetch_list=[loss])


def save_model(mode: int) -> None:
    """Saves networks and rows."""
    fleet.save_inference_model(exe, "serve", ["ids", "dense"], [prob], mode=mode)


train(NUM_FIRST_STEPS)
save_model(0)
for number in itertools.count(1):
    print(f"published {number}", flush=True)
    begun_s = time.monotonic()
    train(NUM_STEPS)
    if is_stopped.wait(max(0.0, begun_s + PERIOD_S - time.monotonic())):
        break
    fleet.save_persistables(exe, "serve/rows", mode=1)  # a delta is a version
save_model(1)
print(f"published {number + 1}", flush=True)
fleet.stop_worker()
