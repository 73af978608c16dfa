from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_sparse.core.bounds import UNBOUNDED, Bounds
from fleet_sparse.core.decay import Decay
from fleet_sparse.core.ids import table_id, table_salt
from fleet_sparse.core.initializer import Initializer, constant
from support.specs import DENSE, TABLE


def test_salt_and_number_come_from_the_name():
    assert (TABLE.salt, TABLE.table_id) == (table_salt("C1"), table_id("C1"))


def test_hyperparameters_left_out_are_the_defaults_of_the_rule():
    given_one = replace(TABLE, hyperparameters=(("initial_accumulator_value", 1),))
    assert given_one.hyperparameters == (("epsilon", 1e-6), ("initial_accumulator_value", 1.0))


CHANGES = [
    ({"name": "C2"}, "name C1 and C2"),
    ({"dim": 8}, "dim 16 and 8"),
    ({"rule": "sgd", "hyperparameters": ()}, "rule adagrad and sgd"),
    ({"hyperparameters": (("epsilon", 1e-8),)}, "epsilon 1e-06 and 1e-08"),
    ({"initializer": constant(0)}, "initializer uniform(-0.01, 0.01) and constant(0.0)"),
    ({"seed": 8}, "seed 7 and 8"),
]


@pytest.mark.parametrize(("change", "difference"), CHANGES)
def test_difference_is_named_and_changes_the_schema_hash(change, difference):
    other = replace(TABLE, **change)
    assert TABLE.differences(other) == [difference]
    assert TABLE.schema_hash != other.schema_hash


def test_max_ids_may_differ():
    other = replace(TABLE, max_ids=None)
    assert TABLE.differences(other) == []
    assert TABLE.schema_hash == other.schema_hash


def test_side_that_only_reads_need_not_know_the_rule():
    reader = replace(TABLE, rule="read_only", hyperparameters=())
    assert TABLE.differences(reader) == []
    assert reader.differences(TABLE) == []
    assert replace(reader, dim=4).differences(TABLE) == ["dim 4 and 16"]


def test_table_and_dense_parameters_differ():
    assert TABLE.differences(DENSE) == ["kind table and dense"]
    assert DENSE.differences(TABLE) == ["kind dense and table"]


def test_every_rule_accepts_decay_which_is_left_out_at_zero():
    decayed = replace(TABLE, hyperparameters=(("l2_decay", 0.5),))
    assert (TABLE.decay, decayed.decay) == (Decay(), Decay(l2=0.5))
    assert decayed.schema_hash != TABLE.schema_hash
    assert TABLE.differences(decayed) == ["l2_decay 0.0 and 0.5"]
    assert decayed.differences(TABLE) == ["l2_decay 0.5 and 0.0"]
    assert replace(decayed, hyperparameters=(("l2_decay", 0.0),)) == TABLE


def test_every_rule_accepts_bounds_which_are_left_out_if_wide():
    clipped = replace(TABLE, hyperparameters=(("clip_min", -0.5), ("clip_max", 0)))
    assert (TABLE.bounds, clipped.bounds) == (UNBOUNDED, Bounds(-0.5, 0.0))
    assert clipped.schema_hash != TABLE.schema_hash
    assert clipped.differences(TABLE) == [f"clip_max 0.0 and {UNBOUNDED.high}", f"clip_min -0.5 and {UNBOUNDED.low}"]
    assert replace(clipped, hyperparameters=(("clip_min", UNBOUNDED.low), ("clip_max", UNBOUNDED.high))) == TABLE


REFUSED = [
    ({"name": ""}, "1 to 128"),
    ({"name": "a b"}, "1 to 128"),
    ({"name": "C1\n"}, "1 to 128"),
    ({"name": "x" * 129}, "1 to 128"),
    ({"dim": 0}, "dim .*0.*65535"),
    ({"dim": 65536}, "dim .*65536.*65535"),
    ({"dim": 16.0}, r"dim .*16\.0"),
    ({"dim": True}, "dim .*True"),
    ({"dtype": "float16"}, "dtype .*'float16'.*'float32'"),
    ({"rule": "ftl"}, "'ftl'.*adagrad, adam, adamax, adamw, ctr_adagrad, delta, ftrl, lamb"),
    ({"hyperparameters": (("beta1", 0.9),)}, "'beta1'.*'adagrad'.*epsilon, initial_accumulator"),
    ({"rule": "sgd", "hyperparameters": (("momentum", 0.9),)}, "'momentum'.*'sgd'"),
    ({"hyperparameters": (("epsilon", float("nan")),)}, "'epsilon'.*nan"),
    ({"hyperparameters": (("epsilon", "1"),)}, "'epsilon'.*'1'"),
    ({"hyperparameters": (("clip_max", float("inf")),)}, "'clip_max'.*inf"),
    ({"hyperparameters": (("clip_min", 1.0), ("clip_max", 0.5))}, r"clip_min.*1\.0.*clip_max.*0\.5"),
    ({"seed": -1}, "seed .*-1"),
    ({"seed": 2**64}, "seed .*18446744073709551616"),
    ({"max_ids": 0}, "max_ids .*0"),
    ({"initializer": Initializer("cauchy", 0, 1, 0, 0)}, "initializer.*'cauchy'"),
    ({"initializer": Initializer("uniform", 1, 0, 0, 0)}, r"initializer.*uniform\(1\.0, 0\.0\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_invalid_value_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TABLE, **change)


def test_refusal_names_the_table():
    with pytest.raises(ValueError, match=r"^table 'C1': dim "):
        replace(TABLE, dim=0)
