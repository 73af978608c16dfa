from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.spec_json import parse_spec
from support.specs import DENSE, TABLE, dense_specs, table_specs

BOUNDED_DENSE = replace(DENSE, segments=(DENSE.segments[0]._replace(clip_min=-1, clip_max=1),))
DECAYED_DENSE = replace(DENSE, segments=(DENSE.segments[0]._replace(l2_decay=0.5),))
BOUNDED_TABLE = replace(TABLE, rule="sgd", hyperparameters=(("clip_max", 1),), max_ids=None)


@given(table_specs() | dense_specs())
def test_spec_survives_json(spec):
    again = parse_spec(spec.to_json())
    assert again == spec
    assert again.schema_hash == spec.schema_hash
    assert again.differences(spec) == []


@pytest.mark.parametrize("spec", [BOUNDED_DENSE, DECAYED_DENSE, BOUNDED_TABLE], ids=["bounds", "decay", "table"])
def test_bounds_and_decay_survive_json(spec):
    assert parse_spec(spec.to_json()) == spec


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


def test_json_and_schema_hash_of_bounds_and_decay_are_for_ever():
    assert '"segments":[["w",0,6,1.0,0.0,0.0,-1.0,1.0]]' in BOUNDED_DENSE.to_json()
    assert '"segments":[["w",0,6,1.0,0.0,0.5]]' in DECAYED_DENSE.to_json()
    assert '"hyperparameters":{"clip_max":1.0},' in BOUNDED_TABLE.to_json()
    hashes = [spec.schema_hash for spec in (BOUNDED_DENSE, DECAYED_DENSE, BOUNDED_TABLE)]
    assert hashes == [11663865732741793481, 15539080327986593930, 16244730789853070622]


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
    TABLE.to_json().replace('"dim":16', '"dim":true'),
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
