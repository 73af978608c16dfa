"""Rewriting a Program: as text against golden files, and by running it.

A golden file that differs is rewritten by `GOLDEN=write scripts/test tests/transpiler`; commit it only if
you understand the difference and want it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import paddle
import pytest

from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.describe import describe
from fleet_sparse.transpiler.plan import plan_evaluation, plan_training
from fleet_sparse.transpiler.scan import scan
from support.lookups import look_up, prefetch_body, rows_of

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def run(program, feed, fetch):
    return paddle.static.Executor(paddle.CPUPlace()).run(program, feed=feed, fetch_list=fetch)


def two_fields_on_one_table():
    a = paddle.static.data("a", [-1, 3], "int64")
    b = paddle.static.data("b", [-1], "int64")
    rows_a = look_up(a)
    rows_b = look_up(b * 7 + 3)
    features = paddle.concat([paddle.reshape(rows_a, [-1, 12]), rows_b], axis=1)
    return features, {"a": np.array([[1, 2, 3], [3, 2, 9]]), "b": np.array([0, 5])}


def fuse_for_evaluation(program):
    plan = plan_evaluation(scan(program))
    return rewrite.fuse(program, plan, prefetch_body(plan), for_training=False)


def trained(program, loss):
    """The steps of `minimize`, with updates that do nothing."""
    plan = plan_training(scan(program))
    tables = rewrite.fuse(program, plan, prefetch_body(plan, for_training=True), for_training=True).tables
    forward = {op.id() for op in program.global_block().ops}
    rows = [table.rows for table in tables]
    pairs = paddle.base.backward.append_backward(loss, parameter_list=rows)
    rate = paddle.static.data("rate", [], "float32")

    def token(_, outputs):
        outputs.allocate(0, (1,))[:] = 0

    rewrite.insert_update(tables, [grad for _, grad in pairs], [], rate, [], [], [], token)
    rewrite.resolve(program, tables)
    rewrite.mark_train_only(program, lambda op: op.id() in forward)
    return tables


def test_placeholders_as_text(program):
    two_fields_on_one_table()
    check_golden("placeholders", describe(program))


def test_evaluation_as_text(program):
    two_fields_on_one_table()
    fuse_for_evaluation(program)
    check_golden("evaluation", describe(program))


def test_training_as_text(program):
    features, _ = two_fields_on_one_table()
    trained(program, paddle.mean(features))
    check_golden("training", describe(program))


def test_two_tables_with_padding_as_text(program):
    ids = paddle.static.data("ids", [-1, 2], "int32")
    rows = [look_up(ids, "a", padding_idx=0), look_up(ids, "b", dim=2)]
    trained(program, paddle.mean(paddle.concat(rows, axis=2)))
    check_golden("two_tables_with_padding", describe(program))


def test_without_training_as_text(program):
    features, _ = two_fields_on_one_table()
    plan = plan_training(scan(program))
    trained(program, paddle.mean(paddle.nn.functional.dropout(features, 0.5)))
    clone = program.clone()
    rewrite.without_training(clone, prefetch_body(plan))
    check_golden("without_training", describe(clone))


def test_description_does_not_depend_on_what_was_built_before(program):
    two_fields_on_one_table()
    first = describe(program)
    again = paddle.static.Program()
    with paddle.static.program_guard(again, paddle.static.Program()), paddle.utils.unique_name.guard():
        two_fields_on_one_table()
    assert describe(again) == first


def test_fused_program_gives_the_rows_of_the_placeholders(program):
    features, feed = two_fields_on_one_table()
    (before,) = run(program, feed, [features])
    fuse_for_evaluation(program)
    (after,) = run(program, feed, [features])
    assert before.tolist() == after.tolist()
    assert before[:, :12].reshape(2, 3, 4).tolist() == rows_of(feed["a"], 4).tolist()


def test_ids_of_any_rank_and_width(program):
    shapes = {"scalar_a_row": [-1], "matrix": [-1, 3], "cube": [-1, 2, 2], "column": [-1, 1]}
    inputs = {name: paddle.static.data(name, shape, "int32") for name, shape in shapes.items()}
    values = [look_up(value) for value in inputs.values()]
    feed = {n: np.arange(2 * int(np.prod(s[1:])), dtype=np.int32).reshape(2, *s[1:]) for n, s in shapes.items()}
    rewritten = fuse_for_evaluation(program)
    results = run(program, feed, [new for _, new in rewritten.replaced])
    assert len(values) == len(results)
    for (name, ids), result in zip(feed.items(), results, strict=True):
        assert result.tolist() == rows_of(ids, 4).tolist(), name


def test_values_of_placeholders_stay_valid_after_the_rewrite(program):
    ids = paddle.static.data("ids", [-1], "int64")
    rows = look_up(ids)
    look_up(ids + 1)
    rewritten = fuse_for_evaluation(program)
    assert rewritten.replaced[0][0].is_same(rows)
    assert list(rows.shape) == [-1, 4]


def test_gradient_of_rows_sums_over_fields_and_repeats(program):
    ids = paddle.static.data("ids", [-1], "int64")
    loss = paddle.sum(look_up(ids)) + 2 * paddle.sum(look_up(ids + 1))
    plan = plan_training(scan(program))
    (table,) = rewrite.fuse(program, plan, prefetch_body(plan, for_training=True), for_training=True).tables
    ((_, grad),) = paddle.base.backward.append_backward(loss, parameter_list=[table.rows])
    rewrite.resolve(program, [table])
    rows, grads = run(program, {"ids": np.array([5, 6, 5])}, [table.prefetched_rows, grad])
    assert rows[:, 0].tolist() == [5, 6, 7]
    assert grads[:, 0].tolist() == [2.0, 1.0 + 4.0, 2.0]


@pytest.mark.parametrize("shape", [[0], [0, 3]])
def test_batch_without_ids_runs(program, shape):
    ids = paddle.static.data("ids", [-1, *shape[1:]], "int64")
    rows = look_up(ids)
    look_up(ids, "other")
    new = fuse_for_evaluation(program).replaced[0][1]
    assert rows is not None
    assert run(program, {"ids": np.zeros(shape, np.int64)}, [new])[0].shape == (*shape, 4)
