"""Programs for inference: as text against golden files, and by running them.

A golden file that differs is rewritten by `GOLDEN=write scripts/test tests/transpiler`; commit it only if
you understand the difference and want it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import paddle
import pytest

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler import inference, rewrite
from fleet_sparse.transpiler.describe import describe
from fleet_sparse.transpiler.inference import FilledHole, TableParameters
from fleet_sparse.transpiler.plan import plan_evaluation
from fleet_sparse.transpiler.scan import scan
from support.lookups import look_up, prefetch_body, rows_of

GOLDEN = Path(__file__).parent / "golden" / "inference"
FEED = {"a": np.array([[1, 2, 3], [3, 2, 9]]), "b": np.array([0, 5])}


def check_golden(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def run(program, feed, fetch, values=None):
    """Runs a program whose parameters have `values`, 1 if they are not among them."""
    scope = paddle.static.Scope()
    for parameter in program.global_block().all_parameters():
        dtype = str(parameter.dtype).rpartition(".")[2].lower()
        given = (values or {}).get(parameter.name, np.ones(parameter.shape, dtype))
        scope.var(parameter.name).get_tensor().set(given, paddle.CPUPlace())
    with paddle.static.scope_guard(scope):
        return paddle.static.Executor(paddle.CPUPlace()).run(program, feed=feed, fetch_list=fetch)


def two_fields_on_one_table():
    """Ids that are fed and ids that are computed, and an op that does not belong to the result."""
    a, b = paddle.static.data("a", [-1, 3], "int64"), paddle.static.data("b", [-1], "int64")
    features = paddle.concat([paddle.reshape(look_up(a), [-1, 12]), look_up(b * 7 + 3, padding_idx=38)], axis=1)
    paddle.mean(look_up(a, "other") * 2.0)
    return paddle.sum(paddle.square(features), axis=1) + paddle.sum(features, axis=1)


def filled(forward, ids, dtype="float32", scales=""):
    """Returns the filled program, its target and the values of the parameters, for a table with these ids."""
    network = inference.with_holes(forward)
    feeds = {hole.feed: (hole.ids.shape, str(hole.ids.dtype).rpartition(".")[2].lower()) for hole in forward.holes}
    program = network.program
    inputs = inference.add_inputs(program, {name: feed for name, feed in feeds.items() if name})
    computed = iter(network.targets[len(forward.targets) :])
    holes = []
    for number, hole in enumerate(forward.holes):
        table = hole.spec.embedding.name
        value = inputs[hole.feed] if hole.feed else next(computed)
        holes.append(FilledHole(inputs[f"{table}@lookup.{number}"], value, table, hole.spec.padding_idx))
    rows = np.concatenate([rows_of(ids, 4), np.full((1, 4), 0.5, np.float32), np.zeros((1, 4), np.float32)])
    names = {hole.table for hole in holes}
    tables = {name: TableParameters("emb@ids", len(ids), f"{name}@rows", 4, dtype, scales) for name in names}
    inference.fill(program, holes, tables)
    values = {f"{name}@rows": rows if name == "emb" else -10 * rows for name in names}
    return program, network.targets[0], {"emb@ids": ids, **values}


def expected(program, target):
    (value,) = run(program, FEED, [target])
    return value


def test_forward_program_as_text(program):
    forward = inference.forward_part(program, [two_fields_on_one_table()])
    check_golden("forward", describe(forward.program))


def test_forward_program_of_a_prefetch_as_text(program):
    target = two_fields_on_one_table()
    plan = plan_evaluation(scan(program))
    rewrite.fuse(program, plan, prefetch_body(plan), for_training=False)
    forward = inference.forward_part(program, [target])
    check_golden("forward_of_prefetch", describe(forward.program))


def test_split_network_as_text(program):
    network = inference.split(inference.forward_part(program, [two_fields_on_one_table()]))
    check_golden("split", describe(network.program))


def test_network_of_ids_as_text(program):
    network = inference.ids_network(inference.forward_part(program, [two_fields_on_one_table()]))
    check_golden("ids", describe(network.program))


def test_whole_program_as_text(program):
    whole, _, _ = filled(inference.forward_part(program, [two_fields_on_one_table()]), np.arange(3))
    check_golden("whole", describe(whole))


def test_guarded_program_as_text(program):
    network = inference.split(inference.forward_part(program, [two_fields_on_one_table()]))
    assert inference.guard(network.program, network.targets) == ["fs_guard.0"]
    check_golden("guarded", describe(network.program))


def test_equal_values_are_guarded_as_one(program):
    x = paddle.static.data("x", [-1, 3], "float32")
    target = paddle.sum(x, axis=1) + paddle.square(paddle.sum(x, axis=1))
    assert inference.guard(program, [target]) == ["fs_guard.0", "fs_guard.1"]


def test_a_value_that_is_also_a_result_is_guarded(program):
    x = paddle.static.data("x", [-1, 3], "float32")
    logit = paddle.sum(x, axis=1)
    prediction = paddle.nn.functional.sigmoid(logit)
    assert inference.guard(program, [prediction]) == []
    assert inference.guard(program, [logit, prediction]) == ["fs_guard.0"]


def test_scales_of_integers_become_multiplications_of_them(program):
    x = paddle.static.data("x", [-1], "int64")
    y = x * 1000003 + 7
    inference.with_onnx_ops(program)
    assert "scale" not in describe(program)
    (result,) = [op.result(0) for op in program.global_block().ops][-1:]
    assert run(program, {"x": np.array([2**40, -(2**63)])}, [result])[0].tolist() == [2**40 * 1000003 + 7, 7 - 2**63]
    assert y is not None


@pytest.mark.parametrize("right", [False, True])
def test_searches_become_counts_for_onnx(program, right):
    ends, values = (paddle.static.data(name, [-1], "int64") for name in ("ends", "values"))
    found = paddle.searchsorted(ends, values, right=right) + 1
    inference.with_onnx_ops(program)
    assert "searchsorted" not in describe(program)
    feed = {"ends": np.array([2, 2, 3, 6]), "values": np.array([0, 2, 5, 6, 7])}
    expected = np.searchsorted(feed["ends"], feed["values"], "right" if right else "left") + 1
    (result,) = [op.result(0) for op in program.global_block().ops][-1:]
    assert run(program, feed, [result])[0].tolist() == expected.tolist()
    assert found is not None


def test_the_original_program_is_unchanged(program):
    target = two_fields_on_one_table()
    before = describe(program)
    forward = inference.forward_part(program, [target])
    inference.split(forward)
    filled(forward, np.arange(3))
    assert describe(program) == before


def test_split_network_gives_what_the_lookups_gave(program):
    target = two_fields_on_one_table()
    network = inference.split(inference.forward_part(program, [target]))
    rows = rows_of(np.arange(40), 4)
    rows[38] = 0
    feed = {"emb@rows": rows, "emb@index.0": FEED["a"], "emb@index.1": FEED["b"] * 7 + 3}
    assert sorted(inference.inputs_of(network.program)) == sorted(feed)
    (value,) = run(network.program, feed, list(network.targets))
    feed_of_rows = rows_of(FEED["a"], 4).reshape(2, 12), rows[FEED["b"] * 7 + 3]
    features = np.concatenate(feed_of_rows, axis=1)
    np.testing.assert_allclose(value, (features**2).sum(1) + features.sum(1))


@pytest.mark.parametrize("order", [1, -1])
def test_whole_program_finds_ids_unseen_ids_and_padding(program, order):
    a = paddle.static.data("a", [-1, 3], "int64")
    target = look_up(a[:, ::order], padding_idx=9) + 0.0
    whole, value, values = filled(inference.forward_part(program, [target]), np.array([-(2**63), 1, 3, 2**63 - 1]))
    ids = np.array([[-(2**63), 2, 9], [2**63 - 1, 3, -1]])
    (found,) = run(whole, {"a": ids}, [value], values)
    assert found[:, ::order, 1].tolist() == [[1.0, 0.5, 0.0], [1.0, 1.0, 0.5]]
    assert found[1, ::order, 0][1] == 3.0


@pytest.mark.parametrize("shape", [[0, 3], [1, 3], [5, 3]])
def test_whole_program_takes_any_batch(program, shape):
    a = paddle.static.data("a", [-1, 3], "int32")
    whole, value, values = filled(inference.forward_part(program, [look_up(a) + 0.0]), np.arange(3))
    assert run(whole, {"a": np.zeros(shape, np.int32)}, [value], values)[0].shape == (*shape, 4)


def test_lookups_of_one_input_share_one_search(program):
    a = paddle.static.data("a", [-1, 3], "int64")
    whole, _, _ = filled(inference.forward_part(program, [look_up(a) + look_up(a)]), np.arange(3))
    assert describe(whole).count("searchsorted") == 1


def test_tables_with_the_same_ids_share_them_and_one_search(program):
    a = paddle.static.data("a", [-1, 3], "int64")
    forward = inference.forward_part(program, [look_up(a) + look_up(a, "other")])
    whole, value, values = filled(forward, np.array([1, 3]))
    assert describe(whole).count("searchsorted") == 1
    parameters = [parameter.name for parameter in whole.global_block().all_parameters()]
    assert sorted(parameters) == ["emb@ids", "emb@rows", "other@rows"]
    ids = np.array([[1, 2, 3]])
    (found,) = run(whole, {"a": ids}, [value], values)
    assert found[0, 1].tolist() == [0.5 - 5.0] * 4
    assert found[0, ::2].tolist() == (rows_of(np.array([1, 3]), 4) * -9).tolist()


def test_positions_of_many_ids_are_not_rounded(program):
    a = paddle.static.data("a", [-1], "int64")
    forward = inference.forward_part(program, [look_up(a, padding_idx=2**40 + 1) + 0.0])
    table = TableParameters("emb@ids", 2**25 + 2, "emb@rows", 4)
    network = inference.with_holes(forward)
    inputs = inference.add_inputs(network.program, {"a": ([-1], "int64")})
    inference.fill(network.program, [FilledHole(inputs["emb@lookup.0"], inputs["a"], "emb", 2**40 + 1)], {"emb": table})
    full = [
        op
        for op in network.program.global_block().ops
        if op.name() == "pd_op.full" and "int64" in str(op.result(0).dtype).lower()
    ]
    assert [op.attrs()["value"] for op in full] == [2**25 + 1, 2**25 + 2, 2**40 + 1, 2**25 + 3]


def test_ids_computed_from_rows_cannot_be_split(program):
    a = paddle.static.data("a", [-1], "int64")
    target = paddle.mean(look_up(paddle.cast(look_up(a)[:, 0], "int64")))
    forward = inference.forward_part(program, [target])
    assert not inference.is_split(forward)
    whole, value, values = filled(forward, np.arange(8))
    (found,) = run(whole, {"a": np.array([3, 5])}, [value], values)
    assert found == pytest.approx((3 + 5 + 6) / 8)


def test_lookups_in_control_flow_are_refused(program):
    a = paddle.static.data("a", [-1], "int64")
    target = paddle.static.nn.cond(paddle.sum(a) > 0, lambda: look_up(a), lambda: look_up(a) * 2)
    with pytest.raises(PlanError, match=r"table 'emb' is inside pd_op.if"):
        inference.forward_part(program, [target])


@pytest.mark.parametrize("number_of", [lambda a: a, look_up, lambda a: paddle.static.create_parameter([2], "float32")])
def test_a_network_without_ops_can_be_saved(program, number_of):
    a = paddle.static.data("a", [-1], "int64")
    forward = inference.forward_part(program, [number_of(a)])
    network, names = inference.savable(inference.with_holes(forward))
    assert [name in describe(network.program) for name in names] == [True]
    assert network.program.global_block().all_parameters()
