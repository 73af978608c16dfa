"""An online trainer in the shape of those for Paddle 2's pservers: passes over days, with ragged slots and entries."""

# ruff: noqa: E402, E702, SIM112, I001
# fmt: off
import fleet_sparse; fleet_sparse.install()
# fmt: on
import os

os.environ["FLAGS_enable_pir_api"] = "0"

import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from paddle.distributed.fleet.base.role_maker import PaddleCloudRoleMaker

NUM_SLOTS, DIM = 3, 8


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.layers = [paddle.nn.Linear(NUM_SLOTS * DIM, 16), paddle.nn.ReLU(), paddle.nn.Linear(16, 1)]
        for number, layer in enumerate(self.layers):
            self.add_sublayer(f"layer_{number}", layer)

    def forward(self, show, click, slots):
        show, click = paddle.cast(show, "float32"), paddle.cast(click, "float32")
        entry = paddle.distributed.ShowClickEntry(show.name, click.name)
        pooled, self.rows = [], []
        for slot in slots:
            attr = paddle.ParamAttr(name="embedding")
            rows = paddle.static.nn.sparse_embedding(slot, [1000, DIM], padding_idx=0, entry=entry, param_attr=attr)
            self.rows.append(rows)
            pooled.append(paddle.static.nn.sequence_pool(rows, "sum"))
        y = paddle.concat(pooled, axis=1)
        for layer in self.layers:
            y = layer(y)
        return paddle.nn.functional.sigmoid(paddle.clip(y, -15.0, 15.0))


def dataset_of(inputs, day):
    dataset = paddle.base.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var(inputs)
    dataset.set_batch_size(16)
    dataset.set_thread(2)
    dataset.set_hdfs_config("", "")
    files = sorted(str(path) for path in Path("data", day).iterdir())
    dataset.set_filelist(fleet.util.get_file_shard(files))
    dataset.set_pipe_command(f"{sys.executable} {Path(__file__).parent / 'client_reader.py'}")
    dataset.load_into_memory()
    return dataset


def total(value):
    """The sum of a statistic over all workers."""
    local = np.array(paddle.static.global_scope().find_var(value.name).get_tensor())
    return fleet.util.all_reduce(local, "sum")


def report(day, name, auc_statistics, metrics):
    sums = [float(total(metric)[0]) for metric in metrics]
    pos, neg = (total(each).reshape(-1)[::-1].cumsum() for each in auc_statistics[2:])
    area = float((np.diff(neg, prepend=0) * (pos + np.r_[0, pos[:-1]]) / 2).sum())
    print(day, name, "auc", round(area / float(pos[-1] * neg[-1]), 4), "clicks", sums[4], "of", sums[5], flush=True)
    for value in (*auc_statistics, *metrics):
        tensor = paddle.static.global_scope().find_var(value.name).get_tensor()
        tensor.set(np.zeros_like(np.array(tensor)), paddle.CPUPlace())


def main():
    fleet.init(PaddleCloudRoleMaker())
    show, click, *slots = inputs = [
        paddle.static.data(name=name, shape=[None, 1], dtype="int64", lod_level=1)
        for name in ("show", "click", *(str(number) for number in range(NUM_SLOTS)))
    ]
    net = Net()
    predicted = net(show, click, slots)
    both = paddle.concat([1 - predicted, predicted], axis=1)
    auc, _, auc_statistics = paddle.static.auc(input=both, label=click, slide_steps=0)
    metrics = paddle.static.ctr_metric_bundle(predicted, paddle.cast(click, "float32"))
    cost = paddle.mean(paddle.nn.functional.log_loss(input=predicted, label=paddle.cast(click, "float32")))

    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.adam_d2sum = True
    fleet.distributed_optimizer(paddle.optimizer.Adam(0.02, lazy_mode=True), strategy).minimize(cost)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    program = paddle.static.default_main_program()
    for day in ("20190720", "20190721", "20190722"):
        dataset = dataset_of(inputs, day)
        dataset.global_shuffle(fleet, 12)
        print(day, "lines", dataset.get_shuffle_data_size(fleet), flush=True)
        for name, run in (("infer", exe.infer_from_dataset), ("train", exe.train_from_dataset)):
            run(program, dataset, fetch_list=[cost, auc], fetch_info=["cost", "auc"], print_period=5, debug=False)
            fleet.barrier_worker()
            report(day, name, auc_statistics, metrics)
        dataset.release_memory()
        fleet.save_persistables(exe, f"model/{day}/", None, mode=3)
        fleet.shrink()
        fleet.save_inference_model(exe, f"model/{day}/base", [rows.name for rows in net.rows], [predicted], mode=2)
        fleet.barrier_worker()
    if fleet.is_first_worker():
        fleet.load_model("model/20190722", 0)
    fleet.barrier_worker()
    program._fleet_opt.update(dump_fields=[predicted.name], dump_fields_path="dump")
    exe.infer_from_dataset(program, dataset_of(inputs, "20190720"))
    fleet.stop_worker()


if __name__ == "__main__":
    paddle.enable_static()
    main()
