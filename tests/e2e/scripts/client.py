"""A trainer in the shape of those for Paddle 2's pservers, with the one line that is added to them."""

# ruff: noqa: E402, E702, SIM112, I001
# fmt: off
import fleet_sparse; fleet_sparse.install()
# fmt: on
import os

os.environ["FLAGS_enable_pir_api"] = "0"

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from paddle.distributed.fleet.base.role_maker import PaddleCloudRoleMaker

NUM_SLOTS, NUM_IDS, DIM = 4, 1000, 8


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        uniform = paddle.nn.initializer.Uniform(-0.1, 0.1)
        attr = paddle.ParamAttr(name="SparseFeatFactors", initializer=uniform)
        self.embedding = paddle.nn.Embedding(NUM_IDS, DIM, sparse=True, padding_idx=0, weight_attr=attr)
        self.layers = [paddle.nn.Linear(NUM_SLOTS * DIM, 16), paddle.nn.ReLU(), paddle.nn.Linear(16, 2)]
        for number, layer in enumerate(self.layers):
            self.add_sublayer(f"layer_{number}", layer)

    def forward(self, slots):
        y = paddle.concat([paddle.reshape(self.embedding(slot), [-1, DIM]) for slot in slots], axis=1)
        for layer in self.layers:
            y = layer(y)
        return y


def batches(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        slots = rng.integers(0, 40, (32, NUM_SLOTS))
        label = (slots[:, :1] % 2 == 0).astype("int64")
        yield {"label": label, **{str(i + 1): slots[:, i : i + 1] for i in range(NUM_SLOTS)}}


def global_auc(scope, *names):
    pos, neg = (fleet.util.all_reduce(np.array(scope.find_var(name).get_tensor()).reshape(-1)) for name in names)
    pos, neg = pos[::-1].cumsum(), neg[::-1].cumsum()
    area = ((neg - np.r_[0, neg[:-1]]) * (pos + np.r_[0, pos[:-1]]) / 2).sum()
    return area / (pos[-1] * neg[-1]), pos[-1] + neg[-1]


def main():
    fleet.init(PaddleCloudRoleMaker())
    slots = [paddle.static.data(name=str(i + 1), shape=[None, 1], dtype="int64") for i in range(NUM_SLOTS)]
    label = paddle.static.data(name="label", shape=[None, 1], dtype="int64")
    raw = Net()(slots)
    auc, batch_auc, [batch_pos, batch_neg, pos, neg] = paddle.static.auc(
        input=paddle.nn.functional.softmax(raw), label=label, num_thresholds=2**12, slide_steps=20
    )
    cost = paddle.mean(paddle.nn.functional.cross_entropy(input=raw, label=label))

    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.trainer_desc_configs = {"dump_fields_path": "", "dump_fields": [], "stat_var_names": []}
    strategy.adam_d2sum = True
    strategy.sparse_table_configs = {"embedding": {"table_parameters.embedding.shard_num": 10}}
    optimizer = paddle.optimizer.Adam(learning_rate=0.01, lazy_mode=True)
    fleet.distributed_optimizer(optimizer, strategy).minimize(cost)

    if fleet.is_server():
        fleet.init_server(None)
        fleet.run_server()
        return
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    program = paddle.static.default_main_program()
    program._fleet_opt["stat_var_names"] = [pos.name, neg.name]
    for epoch in range(3):
        for feed in batches([epoch, fleet.worker_index()]):
            values = exe.run(program, feed=feed, fetch_list=[cost.name, auc, batch_auc])
        fleet.barrier_worker()
        scope = paddle.static.global_scope()
        print("epoch", epoch, "cost", float(values[0]), "auc", *global_auc(scope, pos.name, neg.name), flush=True)
        for value in (pos, neg, batch_pos, batch_neg):
            tensor = scope.find_var(value.name).get_tensor()
            tensor.set(np.zeros(tensor.shape(), "int64"), paddle.CPUPlace())
    if fleet.is_first_worker():
        fleet.save_persistables(exe, "model", program)
    fleet.stop_worker()


if __name__ == "__main__":
    paddle.enable_static()
    main()
