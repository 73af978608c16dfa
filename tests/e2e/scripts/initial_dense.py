"""Prints the first values of a worker's dense parameter, before and after it connects."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
paddle.seed(100 + fleet.worker_index())
rows = paddle.static.nn.embedding(
    paddle.static.data("ids", [None, 1], "int64"), size=[10**6, 8], is_sparse=True, is_distributed=True
)
logit = paddle.static.nn.fc(rows, 1, weight_attr=paddle.ParamAttr(name="weight"))
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(paddle.mean(logit))
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())


def weight() -> float:
    return float(np.asarray(paddle.static.global_scope().find_var("weight").get_tensor()).sum())


print(f"before {weight():.9f}", flush=True)
fleet.init_worker()
print(f"after {weight():.9f}", flush=True)
fleet.stop_worker()
