"""The quick start of Paddle 2's parameter server: a model over a QueueDataset, a yaml file, and a reader class."""

# ruff: noqa: E402, E702, I001
# fmt: off
import fleet_sparse; fleet_sparse.install()
# fmt: on
import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import yaml

CONFIG = """
runner: {sync_mode: async, epochs: 3, batch_size: 16}
hyper_parameters: {dim: 8, num_ids: 1000, learning_rate: 0.02}
table_parameters:
  embedding:
    table_class: MemorySparseTable
    shard_num: 10
    accessor: {accessor_class: SparseAccessor, embedx_dim: 8, embedx_threshold: 10}
"""


class RecDataset(paddle.io.IterableDataset):
    """Reads the lines of test files."""

    def __init__(self, paths):
        super().__init__()
        self.paths = paths

    def __iter__(self):
        for path in self.paths:
            for line in Path(path).read_text().splitlines():
                label, *words = line.split()
                ids = [0, 0, 0]
                for word in words:
                    slot, feasign = map(int, word.split(":"))
                    ids[slot] = feasign
                yield [np.array([int(label)]), *(np.array([feasign]) for feasign in ids)]


class Model:
    def __init__(self, settings):
        self.settings = settings

    def inputs(self):
        return [paddle.static.data(name, [None, 1], "int64") for name in ("label", "0", "1", "2")]

    def net(self, inputs):
        label, *slots = inputs
        layer = paddle.nn.Embedding(
            self.settings["num_ids"],
            self.settings["dim"],
            sparse=True,
            padding_idx=0,
            weight_attr=paddle.ParamAttr(name="embedding", initializer=paddle.nn.initializer.Uniform(-0.1, 0.1)),
        )
        y = paddle.concat([paddle.reshape(layer(slot), [-1, self.settings["dim"]]) for slot in slots], axis=1)
        y = paddle.static.nn.fc(paddle.static.nn.fc(y, 16, activation="relu"), 2, activation="softmax")
        self.auc, _, _ = paddle.static.auc(input=y, label=label)
        return paddle.mean(paddle.nn.functional.cross_entropy(y, label, use_softmax=False))


def strategy_of(config):
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = config["runner"]["sync_mode"] == "async"
    names = {"shard_num", "accessor_class", "embedx_dim", "embedx_threshold"}
    table = config["table_parameters"]["embedding"]
    flat = {**table, **{f"accessor.{name}": value for name, value in table["accessor"].items() if name in names}}
    del flat["accessor"]
    strategy.sparse_table_configs = {
        "embedding": {f"table_parameters.embedding.{name}": value for name, value in flat.items()}
    }
    return strategy


def main():
    config = yaml.safe_load(CONFIG)
    fleet.init(is_collective=False)
    model = Model(config["hyper_parameters"])
    inputs = model.inputs()
    cost = model.net(inputs)
    optimizer = paddle.optimizer.Adam(config["hyper_parameters"]["learning_rate"], lazy_mode=True)
    fleet.distributed_optimizer(optimizer, strategy_of(config)).minimize(cost)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    program = paddle.static.default_main_program()
    paths = sorted(str(path) for path in Path("data", "20190720").iterdir())
    for epoch in range(config["runner"]["epochs"]):
        dataset = paddle.distributed.QueueDataset()
        reader = Path(__file__).parent / "client_reader.py"
        dataset.init(
            batch_size=config["runner"]["batch_size"],
            thread_num=2,
            use_var=inputs,
            pipe_command=f"{sys.executable} {reader} single",
        )
        dataset.set_filelist(fleet.util.get_file_shard(paths))
        exe.train_from_dataset(program, dataset, fetch_list=[cost, model.auc], fetch_info=["cost", "auc"])
        loader = paddle.io.DataLoader(RecDataset(paths), batch_size=16, drop_last=True)
        test = program.clone(for_test=True)
        names = [each.name for each in inputs]
        costs = [exe.run(test, feed=dict(zip(names, batch, strict=True)), fetch_list=[cost])[0] for batch in loader()]
        print("epoch", epoch, "cost", float(np.mean(costs)), flush=True)
        fleet.barrier_worker()
    fleet.save_persistables(exe, "model")
    fleet.stop_worker()


if __name__ == "__main__":
    paddle.enable_static()
    main()
