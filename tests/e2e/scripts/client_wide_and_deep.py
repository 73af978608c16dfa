"""A wide and deep model in the shape of Paddle 2's examples: a DataLoader, fleet.metrics, distributed inference."""

# ruff: noqa: E402, E702, I001
# fmt: off
import fleet_sparse; fleet_sparse.install()
# fmt: on
import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from paddle.distributed.fleet.utils.ps_util import DistributedInfer

NUM_SLOTS, NUM_IDS, DIM = 4, 1000, 8


class WideDeepModel:
    def inputs(self):
        dense = paddle.static.data(name="dense_input", shape=[None, 3], dtype="float32")
        sparse = [paddle.static.data(name=f"C{i}", shape=[None, 1], dtype="int64") for i in range(NUM_SLOTS)]
        label = paddle.static.data(name="label", shape=[None, 1], dtype="int64")
        return [dense, *sparse, label]

    def net(self, inputs, is_train=True):
        dense, *sparse, label = inputs
        wide = paddle.static.nn.fc(dense, 1, name="wide")
        attr = paddle.ParamAttr(name="embedding", initializer=paddle.nn.initializer.Uniform(-0.1, 0.1))
        rows = [paddle.static.nn.embedding(each, [NUM_IDS, DIM], is_sparse=True, param_attr=attr) for each in sparse]
        deep = paddle.concat([dense, *(paddle.reshape(each, [-1, DIM]) for each in rows)], axis=1)
        deep = paddle.static.nn.fc(paddle.static.nn.fc(deep, 16, activation="relu"), 1)
        predicted = paddle.nn.functional.sigmoid(wide + deep)
        both = paddle.concat([1 - predicted, predicted], axis=1)
        self.auc, self.batch_auc, _ = paddle.static.auc(input=both, label=label, slide_steps=0)
        self.correct = paddle.static.create_global_var(shape=[1], value=0, dtype="float32", persistable=True, name="ok")
        hits = paddle.cast(paddle.cast(predicted > 0.5, "int64") == label, "float32")
        paddle.assign(self.correct + paddle.sum(hits), self.correct)
        cost = paddle.nn.functional.log_loss(predicted, paddle.cast(label, "float32"))
        self.cost = paddle.mean(cost)


def generator(seed):
    def read():
        rng = np.random.default_rng(seed)
        for _ in range(20):
            slots = rng.integers(0, 40, (32, NUM_SLOTS))
            dense = rng.random((32, 3), np.float32)
            yield [dense, *(slots[:, i : i + 1] for i in range(NUM_SLOTS)), (slots[:, :1] % 2 == 0).astype("int64")]

    return read


def run(exe, program, loader, model, epoch):
    for data in loader():
        cost, auc = exe.run(program, feed=data, fetch_list=[model.cost.name, model.auc.name])
    print("epoch", epoch, "cost", float(cost), "auc", round(float(auc), 4), flush=True)


def main():
    fleet.init(is_collective=False)
    model = WideDeepModel()
    inputs = model.inputs()
    loader = paddle.io.DataLoader.from_generator(capacity=64, feed_list=inputs, iterable=True)
    loader.set_batch_generator(generator(1), places=paddle.static.cpu_places())
    model.net(inputs)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(learning_rate=0.02), strategy)
    optimizer.minimize(model.cost)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    for epoch in range(3):
        run(exe, paddle.static.default_main_program(), loader, model, epoch)
        correct = fleet.metrics.sum(model.correct, paddle.static.global_scope())
        print("correct", float(np.array(correct).reshape(-1)[0]), flush=True)
    fleet.barrier_worker()
    dist_infer = DistributedInfer()
    run(exe, dist_infer.get_dist_infer_program(), loader, model, "infer")
    if fleet.is_first_worker():
        fleet.save_persistables(exe, "model", paddle.static.default_main_program())
    fleet.stop_worker()


if __name__ == "__main__":
    paddle.enable_static()
    main()
