from __future__ import annotations

import paddle
import pytest

from fleet_sparse.transpiler.scan import scan
from support.lookups import look_up


def test_program_without_flagged_lookup_has_no_sites(program):
    paddle.mean(paddle.static.data("x", [-1, 3], "float32"))
    assert scan(program).sites == ()


def test_sites_are_numbered_in_program_order(program):
    ids = paddle.static.data("ids", [-1, 3], "int64")
    look_up(ids, "b")
    look_up(ids, "a")
    assert [(site.number, site.spec.embedding.name) for site in scan(program).sites] == [(0, "b"), (1, "a")]


def test_site_in_a_branch_names_its_control_flow(program):
    ids = paddle.static.data("ids", [2], "int64")
    flag = paddle.static.data("flag", [1], "bool")
    paddle.static.nn.cond(flag, lambda: look_up(ids), lambda: paddle.zeros([2, 4]))
    assert [site.control_flow for site in scan(program).sites] == ["pd_op.if"]


def test_ids_computed_from_rows_name_the_other_site(program):
    first = look_up(paddle.static.data("ids", [-1], "int64"))
    look_up(paddle.cast(paddle.sum(first, axis=1), "int64"), "second")
    assert [site.ids_need for site in scan(program).sites] == [(), (0,)]


def test_ids_computed_in_a_branch_from_rows_name_the_other_site(program):
    first = look_up(paddle.static.data("ids", [2], "int64"))
    flag = paddle.static.data("flag", [1], "bool")
    chosen = paddle.static.nn.cond(flag, lambda: paddle.cast(first[:, 0], "int64"), lambda: paddle.zeros([2], "int64"))
    look_up(chosen, "second")
    assert scan(program).sites[1].ids_need == (0,)


def test_clone_keeps_the_sites(program):
    look_up(paddle.static.data("ids", [-1], "int64"), padding_idx=3)
    assert [site.spec for site in scan(program.clone()).sites] == [site.spec for site in scan(program).sites]


@pytest.mark.parametrize(
    "same",
    [
        lambda ids: ids,
        lambda ids: paddle.reshape(ids, [-1]),
        paddle.flatten,
        lambda ids: paddle.squeeze(ids, 1),
        lambda ids: paddle.unsqueeze(ids, 2),
        lambda ids: paddle.cast(paddle.cast(ids, "int32"), "int64"),
        lambda ids: paddle.assign(paddle.unsqueeze(paddle.reshape(ids, [-1]), 0)),
    ],
    ids=["as it is", "reshape", "flatten", "squeeze", "unsqueeze", "cast", "several"],
)
def test_ids_in_another_shape_or_type_are_fed_by_the_input(program, same):
    look_up(same(paddle.static.data("ids", [-1, 1], "int64")))
    assert scan(program).sites[0].fed_by == ("ids",)


@pytest.mark.parametrize(
    "other",
    [
        lambda ids: ids * 2,
        lambda ids: ids % 7,
        lambda ids: ids[:, 0],
        lambda ids: paddle.transpose(ids, [1, 0]),
        lambda ids: paddle.concat([ids, ids], axis=0),
        lambda ids: paddle.expand(ids, [-1, 5]),
        lambda ids: paddle.zeros([3], "int64"),
    ],
    ids=["product", "remainder", "slice", "transpose", "concat", "expand", "constant"],
)
def test_ids_that_are_computed_are_fed_by_no_input(program, other):
    look_up(other(paddle.static.data("ids", [-1, 1], "int64")))
    assert scan(program).sites[0].fed_by == ()


def test_ids_of_inputs_one_after_the_other_are_fed_by_each(program):
    one, other = paddle.static.data("one", [-1], "int64"), paddle.static.data("other", [-1, 3], "int64")
    look_up(paddle.concat([paddle.reshape(other, [-1]), one]))
    look_up(paddle.concat([one, one * 2]))
    assert [site.fed_by for site in scan(program).sites] == [("other", "one"), ()]


def test_each_site_names_its_own_input(program):
    one, other = (paddle.static.data(name, [-1], "int64") for name in ("one", "other"))
    look_up(other)
    look_up(one)
    look_up(other)
    assert [site.fed_by for site in scan(program).sites] == [("other",), ("one",), ("other",)]
