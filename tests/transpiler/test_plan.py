from __future__ import annotations

import paddle
import pytest

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.plan import plan_evaluation, plan_training
from fleet_sparse.transpiler.scan import scan
from support.lookups import look_up


@pytest.fixture
def ids(program):
    return paddle.static.data("ids", [2], "int64")


def test_lookups_of_one_name_share_one_table(program, ids):
    look_up(ids, "a")
    look_up(ids, "b")
    look_up(ids, "a")
    plan = plan_training(scan(program))
    assert [(table.embedding.name, table.sites) for table in plan.tables] == [("a", (0, 2)), ("b", (1,))]


def test_table_is_padded_when_one_of_its_sites_is(program, ids):
    look_up(ids, padding_idx=0)
    look_up(ids)
    assert [table.is_padded for table in plan_training(scan(program)).tables] == [True]


def test_producers_of_later_ids_are_hoisted(program, ids):
    look_up(ids)
    look_up(ids + 1)
    hoisted = [op.name() for op in plan_training(scan(program)).hoisted]
    assert hoisted == ["pd_op.full", "pd_op.scale"]


def test_evaluation_leaves_out_what_cannot_join(program, ids):
    first = look_up(ids, "a")
    look_up(paddle.cast(first[:, 0], "int64"), "b")
    assert [site.spec.embedding.name for site in plan_evaluation(scan(program)).sites] == ["a"]


# Refusals


def test_training_in_control_flow_is_refused_with_the_site(program, ids):
    flag = paddle.static.data("flag", [1], "bool")
    paddle.static.nn.cond(flag, lambda: look_up(ids), lambda: paddle.zeros([2, 4]))
    with pytest.raises(PlanError, match=r"lookup 0 \(table 'emb'\): .*pd_op.if"):
        plan_training(scan(program))


def test_ids_from_another_lookup_are_refused_with_both_sites(program, ids):
    first = look_up(ids, "a")
    look_up(paddle.cast(first[:, 0], "int64"), "b")
    with pytest.raises(PlanError, match=r"lookup 1 \(table 'b'\): .*lookup 0"):
        plan_training(scan(program))


def test_two_dims_of_one_table_are_refused(program, ids):
    look_up(ids, dim=4)
    look_up(ids, dim=8)
    with pytest.raises(PlanError, match=r"'emb'.* 4 .*lookup 0 .* 8 .*lookup 1"):
        plan_training(scan(program))


def test_a_second_minimize_is_refused(program):
    with pytest.raises(PlanError):
        plan_training(scan(program)._replace(is_trained=True))
