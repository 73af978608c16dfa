"""Trains nothing: loads the model that `distributed_embedding.py` saved, and evaluates it."""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
ids = paddle.static.data("ids", [None, 3], "int64")
rows = paddle.static.nn.embedding(
    ids,
    size=[10**11, 8],
    is_sparse=True,
    is_distributed=True,
    param_attr=paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Normal(std=0.1)),
)
if fleet.is_server():
    fleet.init_server("model")
    fleet.run_server()
if "PADDLE_PSERVERS_IP_PORT_LIST" not in os.environ:
    fleet.init_server("model")
fleet.init_worker()
exe = paddle.static.Executor(paddle.CPUPlace())
trained = np.array([[-(2**63), -1, 0], [5, 2**62, 2**63 - 1]])
(values,) = exe.run(feed={"ids": trained}, fetch_list=[rows])
print("rows", values.tobytes().hex(), flush=True)
fleet.stop_worker()
