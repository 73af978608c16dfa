from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.bounds import UNBOUNDED, Bounds
from fleet_sparse.core.decay import Decay
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.ids import table_id, table_salt
from fleet_sparse.core.initializer import Initializer, constant, normal, truncated_normal, uniform
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec

TABLE = TableSpec(name="C1", dim=16, rule="adagrad", initializer=uniform(-0.01, 0.01), seed=7, max_ids=10)
DENSE = DenseSpec("dense", "sgd", (), (Segment("w", 0, 6, 1.0), Segment("b", 6, 2, 2.0)))

names = st.text("abcXYZ019_.@/-", min_size=1, max_size=128)
numbers = st.floats(-1e6, 1e6)
rules = st.sampled_from(sorted(RULES)).flatmap(
    lambda rule: st.tuples(
        st.just(rule),
        st.fixed_dictionaries({}, optional={name: numbers for name, _ in RULES[rule].defaults}).map(
            lambda values: tuple(values.items())
        ),
    )
)
initializers = st.one_of(
    numbers.map(constant),
    st.tuples(numbers, numbers).map(lambda pair: uniform(min(pair), max(pair))),
    st.tuples(numbers, st.floats(0, 10)).map(lambda pair: normal(*pair)),
    st.floats(0.1, 10).map(lambda std: truncated_normal(0, std, -2 * std, std)),
)


@st.composite
def table_specs(draw):
    rule, hyperparameters = draw(rules)
    return TableSpec(
        name=draw(names),
        dim=draw(st.integers(1, 65535)),
        rule=rule,
        hyperparameters=hyperparameters,
        initializer=draw(initializers),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_ids=draw(st.none() | st.integers(1, 2**64)),
    )


@st.composite
def dense_specs(draw):
    rule, hyperparameters = draw(rules)
    sizes = draw(st.lists(st.integers(1, 10**9), min_size=1, max_size=5))
    segments = [Segment(f"p{i}", sum(sizes[:i]), size, draw(numbers)) for i, size in enumerate(sizes)]
    return DenseSpec(draw(names), rule, hyperparameters, tuple(segments))


@given(table_specs() | dense_specs())
def test_spec_survives_json(spec):
    again = parse_spec(spec.to_json())
    assert again == spec
    assert again.schema_hash == spec.schema_hash
    assert again.differences(spec) == []


def test_json_and_schema_hash_of_a_table_are_for_ever():
    # Pservers and workers of two versions compare the hash.
    assert TABLE.to_json() == (
        '{"dim":16,"dtype":"float32","hyperparameters":{"epsilon":1e-06,"initial_accumulator_value":0.0},'
        '"initializer":["uniform",-0.01,0.01,0.0,0.0],"kind":"table","max_ids":10,"name":"C1","rule":"adagrad","seed":7}'
    )
    assert TABLE.schema_hash == 6260472199546538183


def test_json_and_schema_hash_of_dense_parameters_are_for_ever():
    assert DENSE.to_json() == (
        '{"hyperparameters":{},"kind":"dense","name":"dense","rule":"sgd","segments":[["w",0,6,1.0],["b",6,2,2.0]]}'
    )
    assert DENSE.schema_hash == 6126694832954591922


def test_salt_and_number_come_from_the_name():
    assert (TABLE.salt, TABLE.table_id) == (table_salt("C1"), table_id("C1"))
    assert (DENSE.salt, DENSE.table_id) == (table_salt("dense"), table_id("dense"))


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
def test_difference_is_told_and_changes_the_schema_hash(change, difference):
    other = replace(TABLE, **change)
    assert TABLE.differences(other) == [difference]
    assert TABLE.schema_hash != other.schema_hash


def test_promise_on_the_number_of_ids_is_no_difference():
    other = replace(TABLE, max_ids=None)
    assert TABLE.differences(other) == []
    assert TABLE.schema_hash == other.schema_hash


def test_side_that_only_reads_may_not_know_the_rule():
    reader = replace(TABLE, rule="read_only", hyperparameters=())
    assert TABLE.differences(reader) == []
    assert reader.differences(TABLE) == []
    assert replace(reader, dim=4).differences(TABLE) == ["dim 4 and 16"]


def test_table_and_dense_parameters_differ():
    assert TABLE.differences(DENSE) == ["kind table and dense"]
    assert DENSE.differences(TABLE) == ["kind dense and table"]


def test_difference_of_dense_segments_names_the_segment():
    other = replace(DENSE, segments=(Segment("w", 0, 5, 1.0), Segment("b", 5, 2, 1.0)))
    assert DENSE.differences(other) == [
        "segment 'w' size 6 and 5",
        "segment 'b' offset 6 and 5",
        "segment 'b' learning rate 2.0 and 1.0",
    ]
    assert DENSE.differences(replace(DENSE, segments=DENSE.segments[:1])) == ["number of segments 2 and 1"]


def test_decay_goes_with_every_rule_and_is_no_part_of_a_spec_while_it_is_zero():
    decayed = replace(TABLE, hyperparameters=(("l2_decay", 0.5),))
    assert (TABLE.decay, decayed.decay) == (Decay(), Decay(l2=0.5))
    assert decayed.schema_hash != TABLE.schema_hash
    assert TABLE.differences(decayed) == ["l2_decay 0.0 and 0.5"]
    assert decayed.differences(TABLE) == ["l2_decay 0.5 and 0.0"]
    assert replace(decayed, hyperparameters=(("l2_decay", 0.0),)) == TABLE


def test_decay_of_dense_parameters_is_that_of_their_segments():
    decayed = replace(DENSE, segments=(DENSE.segments[0]._replace(l1_decay=0.5), DENSE.segments[1]))
    assert parse_spec(decayed.to_json()) == decayed
    assert decayed.schema_hash != DENSE.schema_hash
    assert decayed.differences(DENSE) == ["segment 'w' l1 decay 0.5 and 0.0"]
    with pytest.raises(ValueError, match="hyperparameter 'l2_decay' is unknown"):
        replace(DENSE, hyperparameters=(("l2_decay", 0.5),))


def test_bounds_go_with_every_rule_and_are_no_part_of_a_spec_while_they_let_everything_pass():
    clipped = replace(TABLE, hyperparameters=(("clip_min", -0.5), ("clip_max", 0)))
    assert (TABLE.bounds, clipped.bounds) == (UNBOUNDED, Bounds(-0.5, 0.0))
    assert parse_spec(clipped.to_json()) == clipped
    assert clipped.schema_hash != TABLE.schema_hash
    assert clipped.differences(TABLE) == [f"clip_max 0.0 and {UNBOUNDED.high}", f"clip_min -0.5 and {UNBOUNDED.low}"]
    assert replace(clipped, hyperparameters=(("clip_min", UNBOUNDED.low), ("clip_max", UNBOUNDED.high))) == TABLE


def test_bounds_of_dense_parameters_are_those_of_their_segments():
    clipped = replace(DENSE, segments=(DENSE.segments[0]._replace(clip_min=-1, clip_max=0.5), DENSE.segments[1]))
    assert [segment.bounds for segment in clipped.segments] == [Bounds(-1.0, 0.5), UNBOUNDED]
    assert parse_spec(clipped.to_json()) == clipped
    assert clipped.schema_hash != DENSE.schema_hash
    assert DENSE.differences(clipped) == [
        f"segment 'w' clip min {UNBOUNDED.low} and -1.0",
        f"segment 'w' clip max {UNBOUNDED.high} and 0.5",
    ]
    with pytest.raises(ValueError, match="hyperparameter 'clip_max' is unknown"):
        replace(DENSE, hyperparameters=(("clip_max", 0.5),))


def test_json_of_clipped_specs_is_for_ever():
    segment = DENSE.segments[0]
    clipped = replace(DENSE, segments=(segment._replace(clip_min=-1.0, clip_max=1.0),))
    assert '"segments":[["w",0,6,1.0,0.0,0.0,-1.0,1.0]]' in clipped.to_json()
    decayed = replace(DENSE, segments=(segment._replace(l2_decay=0.5),))
    assert '"segments":[["w",0,6,1.0,0.0,0.5]]' in decayed.to_json()
    table = replace(TABLE, rule="sgd", hyperparameters=(("clip_max", 1.0),))
    assert '"hyperparameters":{"clip_max":1.0},' in table.to_json()


@given(dense_specs(), st.integers(1, 100))
def test_ranges_of_all_shards_cover_every_value_once(spec, num_shards):
    ranges = [spec.range_of(shard, num_shards) for shard in range(num_shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == spec.num_values
    assert all(left[1] == right[0] for left, right in pairwise(ranges))


@given(dense_specs(), st.integers(1, 100))
def test_ranges_are_even_or_end_where_segments_do(spec, num_shards):
    ranges = [spec.range_of(shard, num_shards) for shard in range(num_shards)]
    if RULES[spec.rule].needs_whole_row:
        offsets = {segment.offset for segment in spec.segments} | {spec.num_values}
        assert {end for both in ranges for end in both} <= offsets
    else:
        sizes = [end - begin for begin, end in ranges]
        assert max(sizes) - min(sizes) <= 1


# Refusals.

REFUSED = [
    ({"name": ""}, "a name should be 1 to 128"),
    ({"name": "a b"}, "a name should be 1 to 128"),
    ({"name": "C1\n"}, "a name should be 1 to 128"),
    ({"name": "x" * 129}, "a name should be 1 to 128"),
    ({"dim": 0}, "dim is 0, should be 1 to 65535"),
    ({"dim": 65536}, "dim is 65536, should be 1 to 65535"),
    ({"dim": 16.0}, r"dim is 16\.0, should be"),
    ({"dim": True}, "dim is True, should be"),
    ({"dtype": "float16"}, "dtype is 'float16', should be 'float32'"),
    (
        {"rule": "ftl"},
        "rule is 'ftl', should be one of adagrad, adam, adamax, adamw, delta, ftrl, lamb",
    ),
    ({"hyperparameters": (("beta1", 0.9),)}, "'beta1' is unknown; rule 'adagrad' has epsilon, initial_accumulator"),
    ({"rule": "sgd", "hyperparameters": (("momentum", 0.9),)}, "'momentum' is unknown; rule 'sgd' has none"),
    ({"hyperparameters": (("epsilon", float("nan")),)}, "'epsilon' is nan, should be a finite number"),
    ({"hyperparameters": (("epsilon", "1"),)}, "'epsilon' is '1', should be a finite number"),
    ({"hyperparameters": (("clip_max", float("inf")),)}, "'clip_max' is inf, should be a finite number"),
    (
        {"hyperparameters": (("clip_min", 1.0), ("clip_max", 0.5))},
        "clip_min is 1.0, should be at most clip_max, which is 0.5",
    ),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**64}, "seed is 18446744073709551616"),
    ({"max_ids": 0}, "max_ids is 0"),
    ({"initializer": Initializer("cauchy", 0, 1, 0, 0)}, "kind is 'cauchy'"),
    ({"initializer": Initializer("uniform", 1, 0, 0, 0)}, "lower bound above"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_value_without_meaning_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TABLE, **change)


def test_refusal_names_the_table():
    with pytest.raises(ValueError, match="table 'C1': dim is 0"):
        replace(TABLE, dim=0)


REFUSED_SEGMENTS = [
    ((), "has no segments"),
    ((Segment("w", 1, 2, 1.0),), "segment 'w' begins at 1, should be 0"),
    ((Segment("w", 0, 2, 1.0), Segment("b", 3, 2, 1.0)), "segment 'b' begins at 3, should be 2"),
    ((Segment("w", 0, 0, 1.0),), "segment 'w' at 0 has size 0"),
    ((Segment("w", 0, 1, float("inf")),), "has learning rate inf"),
    ((Segment("w", 0, 1, 1.0, 0.0, float("nan")),), "has l2 decay nan"),
    ((Segment("w", 0, 1, 1.0, clip_max=float("inf")),), "has clip max inf"),
    (
        (Segment("w", 0, 1, 1.0, clip_min=1.0, clip_max=0.0),),
        r"segment 'w': clip_min is 1\.0, should be at most clip_max",
    ),
]


@pytest.mark.parametrize(("segments", "message"), REFUSED_SEGMENTS)
def test_segments_without_meaning_are_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        replace(DENSE, segments=segments)


BROKEN = [
    "",
    "{",
    "[" * 100_000,
    "null",
    "[]",
    '{"kind":"other"}',
    '{"kind":"table"}',
    '{"kind":"dense"}',
    TABLE.to_json().replace('"seed":7', '"seed":7,"more":1'),
    TABLE.to_json().replace('"dim":16', '"dim":"16"'),
    TABLE.to_json().replace("1e-06", "1e999"),
    TABLE.to_json().replace("1e-06", "1" + "0" * 400),
    TABLE.to_json().replace("-0.01", "1" + "0" * 400),
    TABLE.to_json().replace('"uniform",', ""),
    TABLE.to_json().replace('"name":"C1"', '"name":["C1"]'),
    DENSE.to_json().replace("6,1.0", "6"),
    DENSE.to_json().replace('["w",0,6,1.0]', "7"),
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_broken_text_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011  # each has a message of its own; that it is a ValueError is the fact
        parse_spec(text)


@given(st.sampled_from([TABLE, DENSE]), st.data())
def test_spec_with_any_field_replaced_is_refused_or_read(spec, data):
    fields = json.loads(spec.to_json())
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    anything = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner)
    )
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(anything)
    with suppress(ValueError):
        parse_spec(json.dumps(fields))
