"""Worker 0 trains, then both evaluate; twice. Prints the result of each evaluation."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()


def network():
    ids = paddle.static.data("ids", [None], "int64")
    rows = paddle.static.nn.embedding(
        ids, size=[100, 4], is_sparse=True, is_distributed=True, param_attr=paddle.ParamAttr(name="emb")
    )
    return paddle.mean(paddle.static.nn.fc(rows + 1.0, 1, weight_attr=paddle.ParamAttr(name="w"), bias_attr=False))


loss = network()
evaluation = paddle.static.Program()
with paddle.static.program_guard(evaluation, paddle.static.Program()):
    result = network()
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()
for _ in range(2):
    if fleet.is_first_worker():
        for _ in range(5):
            exe.run(feed={"ids": np.arange(10)}, fetch_list=[loss])
    fleet.barrier_worker()
    (value,) = exe.run(evaluation, feed={"ids": np.arange(10)}, fetch_list=[result])
    print(f"evaluated {float(value):.9f}", flush=True)
    fleet.barrier_worker()
fleet.stop_worker()
