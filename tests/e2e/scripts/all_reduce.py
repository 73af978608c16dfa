"""Sync training with dense parameters, on pservers or by an all-reduce. Prints losses and all dense values, bit by bit.

DENSE is the strategy's `dense`, OPTIMIZER one of the optimizers below. STEPS are the numbers of steps of each worker,
as `50,49`; without it they train until they are killed. The last batches of each ten are shorter, and unequal. FIRST is
the number of the first step. LOAD names a snapshot to begin with, SAVE one to save at the end.
"""

import itertools
import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

import fleet_sparse

OPTIMIZERS = {
    "SGD": lambda: paddle.optimizer.SGD(0.1),
    "Adagrad": lambda: paddle.optimizer.Adagrad(0.05, initial_accumulator_value=0.1),
    "Adam": lambda: paddle.optimizer.Adam(0.01, lazy_mode=True),
    "clipped SGD": lambda: paddle.optimizer.SGD(0.1, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.1)),
}


def parameter(name):
    values = paddle.nn.initializer.Uniform(-0.3, 0.3)  # of each worker another one: worker 0's count
    return paddle.ParamAttr(name=name, initializer=values)


rows = table(paddle.static.data("ids", [None, 4], "int64"), "items", 0.1)
hidden = paddle.static.nn.fc(paddle.sum(rows, axis=1), 8, weight_attr=parameter("w0"), activation="tanh")
label = paddle.static.data("label", [None, 1], "float32")
logit = paddle.static.nn.fc(hidden, 1, weight_attr=parameter("w1"))
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
paddle.seed(int(os.environ.get("PADDLE_TRAINER_ID", "0")) + 7)
strategy = fleet_sparse.PserverStrategy(dense=os.environ["DENSE"])
minimize(loss, OPTIMIZERS[os.environ["OPTIMIZER"]](), strategy)
exe = start()
if "LOAD" in os.environ:
    fleet.load_model(os.environ["LOAD"], 0)
worker = fleet.worker_index()
steps = [int(number) for number in os.environ["STEPS"].split(",")] if "STEPS" in os.environ else None
first = int(os.environ.get("FIRST", "0"))
for step in itertools.count(first) if steps is None else range(first, first + steps[worker]):
    rng = np.random.default_rng((step, worker))
    num_examples = 32 if step % 10 < 8 else 5 + 6 * worker
    ids = rng.integers(0, 40, (num_examples, 4))
    labels = (ids.sum(1, keepdims=True) % 3 < 1).astype(np.float32)
    value = float(exe.run(feed={"ids": ids, "label": labels}, fetch_list=[loss])[0])
    if steps is not None or step % 50 == 0:
        print("loss", value.hex(), "step", step, flush=True)
fleet.barrier_worker()
if "SAVE" in os.environ:
    fleet.save_persistables(exe, os.environ["SAVE"])
    fleet.barrier_worker()
for parameter in paddle.static.default_main_program().global_block().all_parameters():
    values = np.array(paddle.static.global_scope().find_var(parameter.name).get_tensor(), np.float32)
    print("values", parameter.name, values.tobytes().hex(), flush=True)
fleet.stop_worker()
