"""Trains one model twice, on pservers and in plain Paddle from the same initial rows, and compares the losses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import _C_ops
from paddle.base.layer_helper import LayerHelper
from paddle.distributed import fleet

from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.initializer import initial_rows, uniform

from .install import install

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: paddle.optimizer.SGD(0.1),
    "adagrad": lambda: paddle.optimizer.Adagrad(0.05, initial_accumulator_value=0.1),
    "adam": lambda: paddle.optimizer.Adam(0.01, lazy_mode=True),
    "adamw": lambda: paddle.optimizer.AdamW(0.01, weight_decay=0.1, lazy_mode=True),
    "adamax": lambda: paddle.optimizer.Adamax(0.01),
    "momentum": lambda: paddle.optimizer.Momentum(0.05, use_nesterov=True),
    "rmsprop": lambda: paddle.optimizer.RMSProp(0.005, momentum=0.5, centered=True),
    # Without decay there is no trust ratio, which tables have for each row and plain Paddle's parameters as a whole.
    "lamb": lambda: paddle.optimizer.Lamb(0.01, lamb_weight_decay=0.0),
}
TOLERANCE = 1e-6

_NUM_IDS = 200
_BATCH = 256
_TABLES = {"parity.item": 8, "parity.user": 5}  # name -> dim
_RANGE = 0.1
_HIDDEN = 16

_Lookup = Callable[[Any, str], Any]


class Parity(NamedTuple):
    """Losses of the two runs, one a step."""

    pservers: NDArray[np.float64]
    plain: NDArray[np.float64]

    @property
    def largest_difference(self) -> float:
        """Of the losses of one step."""
        return float(np.abs(self.pservers - self.plain).max())


def run_parity(optimizer: str, num_steps: int) -> Parity:
    """Runs both; the roles of the environment say where the pservers are, none set means inside this process.

    Args:
        optimizer: A key of `OPTIMIZERS`. Every batch touches every row, so that lazy and dense rules agree.
        num_steps: Batches to train on.
    """
    install()
    paddle.enable_static()
    plain = _run_plain(optimizer, num_steps)
    return Parity(_run_on_pservers(optimizer, num_steps), plain)


def _run_plain(optimizer: str, num_steps: int) -> NDArray[np.float64]:
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.scope_guard(scope), paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        loss = _model(_plain_lookup())
        OPTIMIZERS[optimizer]().minimize(loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        return _losses(executor, main, loss, num_steps)


def _run_on_pservers(optimizer: str, num_steps: int) -> NDArray[np.float64]:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        fleet.init()
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True
        loss = _model(_flagged_lookup)
        fleet.distributed_optimizer(OPTIMIZERS[optimizer](), strategy).minimize(loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        fleet.init_worker()
        losses = _losses(executor, main, loss, num_steps)
        fleet.stop_worker()
    return losses


def _losses(executor: Any, program: Any, loss: Any, num_steps: int) -> NDArray[np.float64]:
    return np.array([float(executor.run(program, feed=feed, fetch_list=[loss])[0]) for feed in _batches(num_steps)])


def _batches(num_steps: int) -> Iterator[dict[str, NDArray[Any]]]:
    rng = np.random.default_rng(7)
    for _ in range(num_steps):
        items = rng.permutation(np.resize(np.arange(_NUM_IDS), 2 * _BATCH)).reshape(_BATCH, 2)
        users = rng.permutation(np.resize(np.arange(_NUM_IDS), _BATCH))
        label = ((items.sum(axis=1) + users) % 3 == 0).astype(np.float32)
        yield {"items": items.astype(np.int64), "users": users.astype(np.int64), "label": label[:, None]}


def _model(lookup: _Lookup) -> Any:
    """Two fields on one table, the ids of one computed in the graph; a second table; an MLP."""
    items = paddle.static.data("items", [-1, 2], "int64")
    users = paddle.static.data("users", [-1], "int64")
    label = paddle.static.data("label", [-1, 1], "float32")
    vectors = [
        paddle.reshape(lookup(items, "parity.item"), [-1, 2 * _TABLES["parity.item"]]),
        lookup((users * 7 + 3) % _NUM_IDS, "parity.item"),
        lookup(users, "parity.user"),
    ]
    features = paddle.concat(vectors, axis=1)
    hidden = paddle.nn.functional.relu(_linear(features, _HIDDEN, "parity.hidden"))
    return paddle.nn.functional.binary_cross_entropy_with_logits(_linear(hidden, 1, "parity.out"), label)


def _linear(x: Any, num_outputs: int, name: str) -> Any:
    rng = np.random.default_rng(len(name))
    weight = rng.normal(0, 0.3, (int(x.shape[-1]), num_outputs)).astype(np.float32)
    values = {"w": weight, "b": np.zeros(num_outputs, np.float32)}
    w, b = (
        paddle.ParamAttr(name=f"{name}.{part}", initializer=paddle.nn.initializer.Assign(value))
        for part, value in values.items()
    )
    return paddle.nn.Linear(int(x.shape[-1]), num_outputs, weight_attr=w, bias_attr=b)(x)


def _flagged_lookup(ids: Any, table: str) -> Any:
    attr = paddle.ParamAttr(name=table, initializer=paddle.nn.initializer.Uniform(-_RANGE, _RANGE))
    size = [10**11, _TABLES[table]]
    return paddle.static.nn.embedding(ids, size=size, is_sparse=True, is_distributed=True, param_attr=attr)


def _plain_lookup() -> _Lookup:
    """Lookups in parameters that hold the rows which pservers would begin with."""
    weights: dict[str, Any] = {}

    def lookup(ids: Any, table: str) -> Any:
        if table not in weights:
            rows = initial_rows(
                uniform(-_RANGE, _RANGE), np.arange(_NUM_IDS), dim=_TABLES[table], seed=0, salt=table_salt(table)
            )
            attr = paddle.ParamAttr(name=f"{table}.plain", initializer=paddle.nn.initializer.Assign(rows))
            helper = LayerHelper("plain", param_attr=attr)
            weights[table] = helper.create_parameter(attr=helper.param_attr, shape=list(rows.shape), dtype="float32")
        return _C_ops.embedding(ids, weights[table], -1, False)

    return lookup


def main() -> None:
    """`python -m fleet_sparse.plugin.parity OPTIMIZER STEPS`: the comparison as one line of JSON."""
    parity = run_parity(sys.argv[1], int(sys.argv[2]))
    result = {"first": parity.pservers[0], "last": parity.pservers[-1]}
    print(json.dumps({**result, "largest_difference": parity.largest_difference, "tolerance": TOLERANCE}))


if __name__ == "__main__":
    main()
