from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_sparse.models.embedding import LocalTables
from support.click_models import DIM, HIDDEN, NUM_DENSE, NUM_FIELDS, NUM_IDS, BuiltModel


@pytest.fixture
def static_graph() -> Iterator[Any]:
    """Static mode with an own scope and own names."""
    paddle.enable_static()
    scope = paddle.static.Scope()
    with paddle.static.scope_guard(scope), paddle.utils.unique_name.guard():
        yield scope


@pytest.fixture
def build(static_graph: Any) -> Callable[..., BuiltModel]:
    def built(model: Any, *, num_fields: int = NUM_FIELDS, num_labels: int = 1) -> BuiltModel:
        rng = np.random.default_rng(5)
        paddle.seed(1)
        tables = LocalTables(np.arange(NUM_IDS))

        def logits() -> Any:
            ids = paddle.static.data("ids", [None, num_fields], "int64")
            dense = paddle.static.data("dense", [None, NUM_DENSE], "float32")
            return model(ids, dense, embedding=tables, num_fields=num_fields, dim=DIM, hidden=HIDDEN)

        main, startup, evaluation = (paddle.static.Program() for _ in range(3))
        with paddle.static.program_guard(main, startup):
            output = logits()
            label = paddle.static.data("label", [None, num_labels], "float32")
            loss = paddle.nn.functional.binary_cross_entropy_with_logits(output, label)
            paddle.optimizer.Adagrad(0.1).minimize(loss)
        with paddle.static.program_guard(evaluation, paddle.static.Program()):
            evaluation_output = logits()
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)

        def parameters() -> dict[str, Any]:
            names = [parameter.name for parameter in main.global_block().all_parameters()]
            return {name: np.array(static_graph.find_var(name).get_tensor()) for name in names}

        for name, value in parameters().items():  # far from 0, so that every term of an equation counts
            values = rng.uniform(-1, 1, value.shape).astype(np.float32)
            static_graph.find_var(name).get_tensor().set(values, paddle.CPUPlace())
        feed = {
            "ids": rng.integers(0, NUM_IDS, (64, num_fields)),
            "dense": rng.standard_normal((64, NUM_DENSE), np.float32),
            "label": rng.integers(0, 2, (64, num_labels)).astype(np.float32),
        }

        def run(program: Any, *values: Any) -> list[Any]:
            fed = feed if program is main else {name: feed[name] for name in ("ids", "dense")}
            results: list[Any] = executor.run(program, feed=fed, fetch_list=list(values))
            return results

        return BuiltModel(run, main, loss, output, evaluation, evaluation_output, parameters, feed)

    return built


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines to a new file."""

    def written(*texts: str, name: str = "examples.txt") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{text}\n" for text in texts))
        return path

    return written
