"""A model whose lookup is `paddle.static.nn.embedding` with both flags; a second program evaluates it.

Roles come from fleetrun's environment; without it, the same script runs in one process.
"""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()

DICT_SIZE, EMBEDDING_WIDTH = 10**11, 8


def network():
    ids = paddle.static.data(name="ids", shape=[None, 3], dtype="int64")
    label = paddle.static.data(name="label", shape=[None, 1], dtype="float32")
    rows = paddle.static.nn.embedding(
        input=ids,
        size=[DICT_SIZE, EMBEDDING_WIDTH],
        is_sparse=True,
        is_distributed=True,
        param_attr=paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Normal(std=0.1)),
    )
    weight = paddle.ParamAttr(name="out.w")
    bias = paddle.ParamAttr(name="out.b")
    logit = paddle.static.nn.fc(paddle.reshape(rows, [-1, 3 * EMBEDDING_WIDTH]), 1, weight_attr=weight, bias_attr=bias)
    return logit, paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)


def batches(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ids = rng.choice([-(2**63), -1, 0, 5, 2**62, 2**63 - 1], size=(64, 3))
        yield {"ids": ids, "label": (ids.min(axis=1, keepdims=True) < -1).astype("float32")}


paddle.enable_static()
fleet.init()
logit, loss = network()
test_program = paddle.static.Program()
with paddle.static.program_guard(test_program, paddle.static.Program()), paddle.utils.unique_name.guard():
    test_logit, test_loss = network()
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.2), strategy).minimize(loss)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    for feed in batches(fleet.worker_index(), 150):
        exe.run(feed=feed, fetch_list=[loss])
    fleet.barrier_worker()
    losses = [float(exe.run(test_program, feed=feed, fetch_list=[test_loss])[0]) for feed in batches(99, 5)]
    print(f"test loss {np.mean(losses):.6f}", flush=True)
    fleet.save_persistables(exe, "model")
    fleet.stop_worker()
    print("worker done", flush=True)
