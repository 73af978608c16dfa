"""Prints the first values of a worker's dense parameter, before and after it connects."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, table

paddle.seed(100 + fleet.worker_index())
rows = table(paddle.static.data("ids", [None, 1], "int64"), first=None)
logit = paddle.static.nn.fc(rows, 1, weight_attr=paddle.ParamAttr(name="weight"))
minimize(paddle.mean(logit), paddle.optimizer.SGD(0.1), is_sync=False)
paddle.static.Executor(paddle.CPUPlace()).run(paddle.static.default_startup_program())


def weight() -> float:
    return float(np.asarray(paddle.static.global_scope().find_var("weight").get_tensor()).sum())


print(f"before {weight():.9f}", flush=True)
fleet.init_worker()
print(f"after {weight():.9f}", flush=True)
fleet.stop_worker()
