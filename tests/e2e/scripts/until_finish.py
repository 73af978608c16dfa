"""Async training with dense parameters that ends when a file `finish` exists in the working directory."""

import itertools
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
ids = paddle.static.data("ids", [None], "int64")
rows = paddle.static.nn.embedding(
    ids, size=[100, 4], is_sparse=True, is_distributed=True, param_attr=paddle.ParamAttr(name="emb")
)
zero = paddle.ParamAttr(name="w", initializer=paddle.nn.initializer.Constant(0.0))
loss = paddle.mean(paddle.static.nn.fc(rows + 1.0, 1, weight_attr=zero, bias_attr=False))
fleet.distributed_optimizer(paddle.optimizer.SGD(0.01)).minimize(loss)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()
for step in itertools.count():
    (value,) = exe.run(feed={"ids": np.arange(10)}, fetch_list=[loss])
    if step % 50 == 0:
        print(f"step {step} loss {float(value):g}", flush=True)
    if Path("finish").exists():
        break
fleet.barrier_worker()
print("met all workers", flush=True)
fleet.stop_worker()
