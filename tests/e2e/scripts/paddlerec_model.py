"""One static model of PaddleRec: its network, reader and data, trained by SGD; prints the fetched values of each step.

Variables: CONFIG, a `config.yaml`; TOOLS, PaddleRec's folder; PLAIN=1 to train without fleet; FIELDS=9,4 to use the
first sparse and dense fields alone; GIVEN=1 to give the optimizer to fleet in the place of the model. All runs have the
same first values: dense parameters those of their names, rows those that a table would have.
"""

# ruff: noqa: E402, E702, I001
# fmt: off
import fleet_sparse; fleet_sparse.install()
# fmt: on
import json
import logging
import os
import random
import sys
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.initializer import initial_rows
from fleet_sparse.plugin.active_session import active
from fleet_sparse.transpiler.sparse_parameter import first_value_of, sparse_parameters

NUM_STEPS = 5
LEARNING_RATE = 0.05
CONFIG = Path(os.environ["CONFIG"]).resolve()
IS_PLAIN = os.environ.get("PLAIN") == "1"
FIELDS = [int(number) for number in os.environ.get("FIELDS", "").split(",") if number]


def by_sgd(learning_rate=0.001, *_, grad_clip=None, **__):
    """Takes the place of the model's optimizer: lazily trained rows differ from those of the others by design."""
    is_number = isinstance(learning_rate, (int, float))
    return paddle.optimizer.SGD(LEARNING_RATE if is_number else learning_rate, grad_clip=grad_clip)


def seed():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  # readers of PaddleRec draw from it
    paddle.seed(1)


def first_values(main, startup):
    """Functions that set the parameters to the same first values in every run; the pservers have those of tables."""
    sparse = {each.name: each for each in sparse_parameters(main)}
    firsts = {name: first_value_of(startup, name) for name in sparse if not sparse[name].other_users}
    scope, place = paddle.static.global_scope(), paddle.CPUPlace()

    def set_value(name, shape):
        if name not in firsts:
            values = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.05, shape)
        elif IS_PLAIN:
            first, salt = firsts[name], int(table_salt(name))
            values = initial_rows(first.initializer, np.arange(shape[0]), dim=shape[1], seed=first.seed, salt=salt)
        else:
            return
        scope.find_var(name).get_tensor().set(np.asarray(values, np.float32), place)

    return [
        partial(set_value, each.name, tuple(each.shape))
        for each in main.global_block().all_parameters()
        if not each.stop_gradient and each.dtype == paddle.float32
    ]


def main():
    sys.path[:0] = [str(Path(os.environ["TOOLS"]) / "tools"), str(CONFIG.parent)]
    os.chdir(CONFIG.parent)
    logging.getLogger().setLevel(logging.WARNING)
    paddle.optimizer.Adam = paddle.optimizer.Adagrad = by_sgd
    from utils import utils_single

    config = utils_single.load_yaml(str(CONFIG))
    config["config_abs_dir"], config["yaml_path"] = str(CONFIG.parent), str(CONFIG)
    if FIELDS:
        config["hyper_parameters.sparse_inputs_slots"] = 1 + FIELDS[0]  # the label is one of them
        config["hyper_parameters.dense_input_dim"] = FIELDS[1]
    seed()
    model = utils_single.load_static_model_class(config)
    inputs = model.create_feeds()
    names = [each.name for each in inputs]
    fetches = model.net(inputs)
    program, startup = paddle.static.default_main_program(), paddle.static.default_startup_program()
    setters = first_values(program, startup)
    strategy = None
    if not IS_PLAIN:
        fleet.init()
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = False
    if os.environ.get("GIVEN") == "1":
        optimizer = paddle.optimizer.SGD(LEARNING_RATE)
        (optimizer if IS_PLAIN else fleet.distributed_optimizer(optimizer, strategy)).minimize(model._cost)
    else:
        model.create_optimizer(strategy)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(startup)
    for set_value in setters:
        set_value()
    if not IS_PLAIN:
        fleet.init_worker()
    seed()
    steps = []
    for _, batch in zip(range(NUM_STEPS), utils_single.create_data_loader(config, paddle.CPUPlace())()):  # noqa: B905
        used = [*batch[: 1 + FIELDS[0]], batch[-1][:, : FIELDS[1]]] if FIELDS else batch
        values = exe.run(program, feed=dict(zip(names, used, strict=False)), fetch_list=[*fetches.values()])
        steps.append([float(np.asarray(value, np.float64).sum()) for value in values])
    report = {"steps": steps}
    if not IS_PLAIN:
        fleet.barrier_worker()
        report.update(num_tables=len(active().catalog.tables), bytes_pushed=fleet_sparse.stats()["bytes_pushed"])
        fleet.stop_worker()
    return report


if __name__ == "__main__":
    paddle.enable_static()
    try:
        found = main()
    except Exception as error:
        refused = isinstance(error, fleet_sparse.FleetSparseError)
        found = {"refused" if refused else "failed": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)
