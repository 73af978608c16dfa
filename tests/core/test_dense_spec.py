from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.bounds import UNBOUNDED, Bounds
from fleet_sparse.core.dense_spec import Segment
from fleet_sparse.core.ids import table_id, table_salt
from fleet_sparse.core.rules import RULES
from support.specs import DENSE, dense_specs


def test_salt_and_number_come_from_the_name():
    assert (DENSE.salt, DENSE.table_id) == (table_salt("dense"), table_id("dense"))


def test_difference_of_segments_names_the_segment():
    other = replace(DENSE, segments=(Segment("w", 0, 5, 1.0), Segment("b", 5, 2, 1.0)))
    assert DENSE.differences(other) == [
        "parameter 'w' size 6 and 5",
        "parameter 'b' learning rate 2.0 and 1.0",
    ]
    assert DENSE.differences(replace(DENSE, segments=DENSE.segments[:1])) == ["number of parameters 2 and 1"]


def test_each_segment_has_its_own_decay():
    decayed = replace(DENSE, segments=(DENSE.segments[0]._replace(l1_decay=0.5), DENSE.segments[1]))
    assert decayed.schema_hash != DENSE.schema_hash
    assert decayed.differences(DENSE) == ["parameter 'w' l1 decay 0.5 and 0.0"]


def test_each_segment_has_its_own_bounds():
    clipped = replace(DENSE, segments=(DENSE.segments[0]._replace(clip_min=-1, clip_max=0.5), DENSE.segments[1]))
    assert [segment.bounds for segment in clipped.segments] == [Bounds(-1.0, 0.5), UNBOUNDED]
    assert clipped.schema_hash != DENSE.schema_hash
    assert DENSE.differences(clipped) == [
        f"parameter 'w' clip min {UNBOUNDED.low} and -1.0",
        f"parameter 'w' clip max {UNBOUNDED.high} and 0.5",
    ]


@pytest.mark.parametrize("name", ["l2_decay", "clip_max"])
def test_rule_of_dense_parameters_has_no_decay_or_bounds(name):
    with pytest.raises(ValueError, match=f"'dense'.*'{name}'"):
        replace(DENSE, hyperparameters=((name, 0.5),))


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


REFUSED = [
    ((), ""),
    ((Segment("w", 1, 2, 1.0),), "'w'.* 1.* 0"),
    ((Segment("w", 0, 2, 1.0), Segment("b", 3, 2, 1.0)), "'b'.* 3.* 2"),
    ((Segment("w", 0, 0, 1.0),), "'w'.* 0"),
    ((Segment("w", 0, 1, float("inf")),), "'w'.* inf"),
    ((Segment("w", 0, 1, 1.0, 0.0, float("nan")),), "'w'.* nan"),
    ((Segment("w", 0, 1, 1.0, clip_max=float("inf")),), "'w'.* inf"),
    ((Segment("w", 0, 1, 1.0, clip_min=1.0, clip_max=0.0),), r"'w'.*clip_min.*1\.0.*clip_max"),
]


@pytest.mark.parametrize(("segments", "message"), REFUSED)
def test_invalid_segments_are_refused(segments, message):
    with pytest.raises(ValueError, match=f"dense 'dense': .*{message}"):
        replace(DENSE, segments=segments)
