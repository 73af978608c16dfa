"""Fifty steps of `continuous_value_model` and `data_norm`: on fleet_sparse, or with Paddle 2.6.

There its own kernels compute gradients, and a NumPy server does what Paddle's pservers do with them. Prints the losses.
"""

import numpy as np
import paddle

NUM_STEPS, NUM_IDS, DIM, RATE, DECAY = 50, 20, 5, 0.01, 0.9
FIRST = {"batch_size": 8.0, "batch_sum": 1.0, "batch_square": 7.0}


def batch_of(step):
    rng = np.random.default_rng(step)
    return {
        "ids": rng.integers(0, NUM_IDS, (8, 3)),
        "show_click": np.stack([np.ones(8), rng.integers(0, 2, 8)], axis=1).astype(np.float32),
        "values": rng.normal(1, 2, (8, 4)).astype(np.float32),
        "label": rng.random((8, 1)).astype(np.float32),
    }


def loss_of(pooled):
    show_click = paddle.static.data("show_click", [-1, 2], "float32")
    values = paddle.static.data("values", [-1, 4], "float32")
    label = paddle.static.data("label", [-1, 1], "float32")
    clicks = paddle.static.nn.continuous_value_model(pooled, show_click, True)
    normed = paddle.static.nn.data_norm(values, name="n", param_attr=FIRST, summary_decay_rate=DECAY)
    first = paddle.ParamAttr(name="w", initializer=paddle.nn.initializer.Constant(0.1))
    weight = paddle.static.create_parameter([DIM + 4, 1], "float32", attr=first)
    return paddle.mean(paddle.square(paddle.matmul(paddle.concat([clicks, normed], axis=1), weight) - label))


def by_fleet_sparse():
    import paddle.distributed.fleet as fleet

    import fleet_sparse

    fleet_sparse.install()
    fleet.init()
    ids = paddle.static.data("ids", [-1, 3], "int64")
    attr = paddle.ParamAttr(name="T", initializer=paddle.nn.initializer.Constant(0.25))
    rows = paddle.static.nn.sparse_embedding(ids, [NUM_IDS, DIM], param_attr=attr)
    loss = loss_of(paddle.sum(rows, axis=1))
    fleet.distributed_optimizer(paddle.optimizer.SGD(RATE), None).minimize(loss)
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    for step in range(NUM_STEPS):
        yield executor.run(feed=batch_of(step), fetch_list=[loss])[0]
    fleet.stop_worker()


def by_paddle_2():
    pooled = paddle.static.data("pooled", [-1, DIM], "float32")
    pooled.stop_gradient = False
    loss = loss_of(pooled)
    pairs = paddle.static.append_backward(loss)
    executor, scope = paddle.static.Executor(), paddle.static.global_scope()
    executor.run(paddle.static.default_startup_program())
    table = np.full((NUM_IDS, DIM), 0.25, np.float32)
    table[:, :2] = 0
    for step in range(NUM_STEPS):
        feed = batch_of(step)
        ids = feed.pop("ids")
        feed["pooled"] = table[ids].sum(axis=1)
        value, of_pooled, *grads = executor.run(feed=feed, fetch_list=[loss, "pooled@GRAD", *(g for _, g in pairs)])
        yield value
        change = np.concatenate([of_pooled[:, :2], -np.float32(RATE) * of_pooled[:, 2:]], axis=1)
        for place in range(ids.shape[1]):
            np.add.at(table, ids[:, place], change)
        for (parameter, _), grad in zip(pairs, grads):  # noqa: B905  # Paddle 2.6 runs on other Pythons, too
            tensor = scope.find_var(parameter.name).get_tensor()
            old = np.array(tensor)
            new = old * np.float32(DECAY) + grad if parameter.name.startswith("n.") else old - np.float32(RATE) * grad
            tensor.set(new.astype(np.float32), paddle.CPUPlace())


paddle.enable_static()
for loss in by_paddle_2() if paddle.__version__.startswith("2.") else by_fleet_sparse():
    print("loss", repr(float(np.asarray(loss).reshape(-1)[0])))
