from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fleet_sparse.core.cache_limits import CacheLimits
from fleet_sparse.core.mode import ALL_REDUCE, ASYNC, AVG, GEO, SUM, SYNC, Mode, parse_mode
from fleet_sparse.core.row_bound import RowBound

MODES = [
    Mode(SYNC),
    Mode(SYNC, SUM),
    Mode(ASYNC),
    Mode(ASYNC, max_step_lag=0),
    Mode(ASYNC, max_step_lag=7),
    Mode(GEO, k_steps=100),
    Mode(GEO, SUM, k_steps=1),
    Mode(SYNC, dense=ALL_REDUCE),
    Mode(SYNC, SUM, dense_grads_dtype="bfloat16"),
    Mode(ASYNC, max_step_lag=7, dense_grads_dtype="bfloat16"),
    Mode(SYNC, row_bound=RowBound(lag=100, share=0.25)),
    Mode(ASYNC, row_bound=RowBound(drift=0.02)),
    Mode(SYNC, row_bound=RowBound(drift=0.02), cache_limits=CacheLimits(max_bytes=1 << 20, hold_back=0)),
]


def test_default_is_async_without_a_bound():
    assert Mode() == Mode(ASYNC, AVG, None, 0)


def test_limits_of_caches_that_are_left_out_are_the_defaults():
    written = Mode(SYNC, row_bound=RowBound(lag=5), cache_limits=CacheLimits(max_bytes=9)).to_json()
    assert ', "min_dim": 1' in written
    limits = parse_mode(written.replace(', "min_dim": 1', "")).cache_limits
    assert limits == CacheLimits(max_bytes=9)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_parsed_mode_is_the_one_that_was_written(mode):
    assert parse_mode(mode.to_json()) == mode


def test_json_of_a_mode_is_for_ever():
    assert Mode(GEO, SUM, k_steps=8).to_json() == '{"k_steps": 8, "kind": "geo", "max_step_lag": null, "scale": "sum"}'


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (Mode(SYNC), "sync (avg)"),
        (Mode(SYNC, SUM), "sync (sum)"),
        (Mode(ASYNC), "async"),
        (Mode(ASYNC, max_step_lag=0), "async (max_step_lag 0)"),
        (Mode(GEO, SUM, k_steps=8), "geo (k_steps 8, sum)"),
        (Mode(SYNC, dense=ALL_REDUCE), "sync (avg, dense all_reduce)"),
        (Mode(dense_grads_dtype="bfloat16"), "async (FLEET_SPARSE_DENSE_GRADS_DTYPE bfloat16)"),
        (Mode(row_bound=RowBound(drift=0.02)), "async (max_row_drift 0.02)"),
        (Mode(SYNC, row_bound=RowBound(9, 0.25)), "sync (avg, max_row_lag 9, max_row_lag_share 0.25)"),
        (
            Mode(SYNC, row_bound=RowBound(drift=0.02), cache_limits=CacheLimits(max_bytes=1 << 20, hold_back=0)),
            "sync (avg, max_row_drift 0.02, RowCache.max_bytes 1048576, RowCache.hold_back 0)",
        ),
    ],
)
def test_messages_name_what_workers_must_agree_on(mode, text):
    assert str(mode) == text


@pytest.mark.parametrize(
    ("mode", "counts"),
    [
        (Mode(SYNC), True),
        (Mode(ASYNC), False),
        (Mode(ASYNC, max_step_lag=0), True),
        (Mode(ASYNC, max_step_lag=5), True),
        (Mode(GEO, k_steps=8), False),
    ],
    ids=str,
)
def test_steps_are_synchronized_where_pulls_may_wait(mode, counts):
    assert mode.is_step_synchronized is counts


@pytest.mark.parametrize(
    ("mode", "can"),
    [
        (Mode(SYNC), False),
        (Mode(ASYNC), True),
        (Mode(GEO, k_steps=8), True),
        (Mode(ASYNC, max_step_lag=5), True),
        (Mode(ASYNC, row_bound=RowBound(lag=10)), True),
        (Mode(ASYNC, max_step_lag=5, row_bound=RowBound(lag=10)), False),
    ],
    ids=str,
)
def test_jobs_whose_steps_can_be_made_again_outlive_a_worker(mode, can):
    assert mode.can_replace_workers is can


@pytest.mark.parametrize("text", ["", "{", "sync", "[]", "7", "null", '{"kind": "sync", "speed": 1}', "[" * 100_000])
def test_text_that_is_not_a_mode_is_refused(text):
    with pytest.raises(ValueError, match="mode: "):
        parse_mode(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "fast"},
        {"kind": None},
        {"kind": []},
        {"scale": "mean"},
        {"max_step_lag": -1},
        {"max_step_lag": 1.5},
        {"max_step_lag": "2"},
        {"max_step_lag": True},
        {"kind": SYNC, "max_step_lag": 2},
        {"kind": GEO, "k_steps": 8, "max_step_lag": 2},
        {"k_steps": 8},
        {"kind": SYNC, "k_steps": 8},
        {"kind": GEO, "k_steps": 0},
        {"kind": GEO, "k_steps": -8},
        {"kind": GEO, "k_steps": True},
        {"dense": ALL_REDUCE},
        {"kind": GEO, "k_steps": 8, "dense": ALL_REDUCE},
        {"kind": SYNC, "dense": "workers"},
        {"dense_grads_dtype": "float16"},
        {"kind": GEO, "k_steps": 8, "dense_grads_dtype": "bfloat16"},
        {"kind": SYNC, "dense": ALL_REDUCE, "dense_grads_dtype": "bfloat16"},
        {"row_bound": {}},
        {"row_bound": {"lag": 0}},
        {"row_bound": {"lag": 1.5}},
        {"row_bound": {"lag": 1, "drift": 1.0}},
        {"kind": GEO, "k_steps": 8, "row_bound": {"lag": 10}},
    ],
    ids=str,
)
def test_field_with_an_invalid_value_is_refused(changes):
    with pytest.raises(ValueError, match="mode: "):
        parse_mode(json.dumps(structs.asdict(Mode()) | changes))


def test_a_mode_without_a_row_cache_is_written_as_before():
    assert "row_bound" not in Mode().to_json()


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3
)


@given(st.dictionaries(st.sampled_from([*Mode.__struct_fields__, "other"]), JSON))
def test_any_json_gives_a_mode_or_a_value_error(fields):
    text = json.dumps(fields)
    try:
        mode = parse_mode(text)
    except ValueError:
        return
    assert parse_mode(mode.to_json()) == mode
