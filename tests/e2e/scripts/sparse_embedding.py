"""A click model as Paddle's parameter-server guide builds it: sparse_embedding, fleet, roles from the environment.

Nothing but the two lines of the plugin is special to it.
"""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()

NUM_FIELDS, DIM, BATCH = 4, 8, 64

paddle.enable_static()
role = fleet.PaddleCloudRoleMaker()
fleet.init(role)

sparse_inputs = [paddle.static.data(name=f"C{i}", shape=[None, 1], dtype="int64") for i in range(NUM_FIELDS)]
label = paddle.static.data(name="label", shape=[None, 1], dtype="float32")


def embedding_layer(ids):
    return paddle.static.nn.sparse_embedding(
        input=ids,
        size=[1024, DIM],
        param_attr=paddle.ParamAttr(
            name="SparseFeatFactors", initializer=paddle.nn.initializer.Uniform(low=-0.1, high=0.1)
        ),
    )


embeddings = [paddle.reshape(embedding_layer(ids), [-1, DIM]) for ids in sparse_inputs]
features = paddle.concat(embeddings, axis=1)
hidden = paddle.static.nn.fc(x=features, size=16, activation="relu")
logit = paddle.static.nn.fc(x=hidden, size=1)
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)

strategy = fleet.DistributedStrategy()
strategy.a_sync = True
optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(learning_rate=0.01, lazy_mode=True), strategy)
optimizer.minimize(loss)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    rng = np.random.default_rng(fleet.worker_index())
    for step in range(200):
        ids = rng.integers(0, 50, (BATCH, NUM_FIELDS))
        feed = {f"C{i}": ids[:, i : i + 1] for i in range(NUM_FIELDS)}
        feed["label"] = (ids[:, :1] < 25).astype("float32")
        (value,) = exe.run(paddle.static.default_main_program(), feed=feed, fetch_list=[loss])
        if step % 20 == 0 or step == 199:
            print(f"step {step} loss {float(value):.6f}", flush=True)
    if fleet.is_first_worker():
        fleet.save_persistables(exe, "model")
    fleet.barrier_worker()
    fleet.stop_worker()
    print("worker done", flush=True)
