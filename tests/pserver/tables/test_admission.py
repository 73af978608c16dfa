"""Tables with an entry policy on shards, against a dict of rows and totals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.entries import SKETCH, Entry
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frame_format import Op
from support.admissions import FIRST, CountedJob, count_filter, table
from support.shards import FrameClient, code_of, floats, ids_of, make_shard, message_of, push


@contextmanager
def client_of(spec: TableSpec) -> Iterator[FrameClient[Shard]]:
    shard = make_shard(spec)
    try:
        yield FrameClient(shard)
    finally:
        shard.close()


def counts(*values: int) -> dict[str, np.ndarray]:
    return {"counts": np.array(values, np.uint32)}


# Counting


@pytest.mark.parametrize("sketch", [False, True])
def test_an_id_gets_a_row_in_the_push_after_its_count_is_reached(sketch: bool) -> None:
    spec = count_filter(3, sketch=sketch)
    with client_of(spec) as client:
        grads = floats([0.25, 0.25])
        seen = []
        for _ in range(4):
            seen.append(client.rows(spec, 7)[0][0])
            client.push(push(spec, ids_of(7), grads, statistics=counts(2)))
        assert seen == [0.0, 0.0, FIRST, FIRST - 0.25]
        assert client.shard.states()[0].num_rows == 1


def test_ids_without_a_row_read_zeros_beside_rows_and_repeats() -> None:
    spec = count_filter(1)
    with client_of(spec) as client:
        for _ in range(2):
            client.push(push(spec, ids_of(1), floats([1, 1]), statistics=counts(1)))
        assert client.rows(spec, 5, 1, 5, 1) == [[0, 0], [-0.5, -0.5], [0, 0], [-0.5, -0.5]]


def test_a_push_that_is_sent_again_is_not_counted_again() -> None:
    spec = count_filter(2)
    with client_of(spec) as client:
        frame = client.frame(Op.PUSH, push(spec, ids_of(7), floats([1, 1]), statistics=counts(1)))
        for _ in range(3):
            client.ask(Op.PUSH, *frame.blocks, push_seq=1)
        assert client.rows(spec, 7) == [[0, 0]]
        client.ask(Op.PUSH, *frame.blocks, push_seq=2)
        assert client.rows(spec, 7) == [[FIRST, FIRST]]


def test_equal_ids_of_a_push_are_counted_together() -> None:
    spec = count_filter(3)
    with client_of(spec) as client:
        client.push(push(spec, ids_of(7, 8, 7), floats([1, 1], [1, 1], [1, 1]), statistics=counts(1, 2, 2)))
        assert client.rows(spec, 7, 8) == [[FIRST, FIRST], [0, 0]]


def test_a_probability_needs_no_count() -> None:
    spec = table(Entry("probability", (("probability", 0.5),)))
    with client_of(spec) as client:
        before = [row[0] for row in client.rows(spec, *range(100))]
        client.push(push(spec, np.arange(100), np.full((100, 2), 0.25, np.float32)))
        after = [row[0] for row in client.rows(spec, *range(100))]
        assert 30 < before.count(FIRST) < 70
        assert after == [value - 0.25 if value else 0.0 for value in before]
        assert client.shard.states()[0].num_rows == before.count(FIRST)


def test_shows_and_clicks_are_scored() -> None:
    spec = table(Entry("show_click", (("threshold", 1.0),)))
    with client_of(spec) as client:
        said = {"show": floats(5, 5), "click": floats(0, 1)}
        client.push(push(spec, ids_of(1, 2), floats([1, 1], [1, 1]), statistics=said))
        assert client.rows(spec, 1, 2) == [[0, 0], [FIRST, FIRST]]


def test_an_id_whose_row_was_removed_is_counted_from_0() -> None:
    spec = count_filter(2)
    with client_of(spec) as client:
        block = push(spec, ids_of(7), floats([1, 1]), statistics=counts(2))
        for _ in range(2):
            client.push(block)
        (entry,) = client.shard.tables.values()
        for _ in range(2):
            entry.table.end_day()
        client.shard.shrink([Criterion("unseen_days", 1)])
        assert client.rows(spec, 7) == [[0, 0]]
        client.push(block)
        assert client.rows(spec, 7) == [[FIRST, FIRST]]


# A model

Step = list[tuple[int, int]]
STEPS = st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3)), unique_by=lambda pair: pair[0]), max_size=8)


def trained_by_model(steps: list[Step], threshold: int) -> dict[int, float]:
    """Rows of the ids that have one, where each push subtracts 0.25."""
    rows: dict[int, float] = {}
    totals: dict[int, int] = {}
    for step in steps:
        for id_, count in step:
            if id_ in rows or totals.get(id_, 0) >= threshold:
                rows[id_] = rows.get(id_, FIRST) - 0.25
            else:
                totals[id_] = totals.get(id_, 0) + count
    return rows


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, threshold=st.integers(0, 5), num_shards=st.sampled_from([1, 3, 7]), sketch=st.booleans())
def test_rows_are_those_of_the_model_on_any_number_of_shards(
    steps: list[Step], threshold: int, num_shards: int, sketch: bool
) -> None:
    job = CountedJob(count_filter(threshold, sketch=sketch), num_shards=num_shards)
    try:
        for step in steps:
            job.push(ids_of(*(id_ for id_, _ in step)), np.array([count for _, count in step], np.uint32))
        expected = trained_by_model(steps, threshold)
        assert job.num_rows == len(expected)
        assert {id_: job.value_of(id_) for id_ in expected} == expected
    finally:
        job.close()


def test_a_sketch_admits_the_same_ids_on_1_3_and_7_shards() -> None:
    """With so many ids that totals are too large for some."""
    spec = table(Entry("count_filter", (("threshold", 2),), SKETCH, 1))
    batches = [np.random.default_rng(seed).permutation(300_000)[:200_000] for seed in range(3)]
    found = []
    for num_shards in (1, 3, 7):
        job = CountedJob(spec, num_shards=num_shards)
        for batch in batches:
            job.push(batch)
        found.append(job.rows(np.arange(300_000)))
        num_rows = job.num_rows
        job.close()
    assert found[0] == found[1] == found[2]
    assert 100_000 < num_rows < 300_000


@pytest.mark.parametrize("sketch", [False, True])
def test_ids_that_are_named_once_take_no_row(sketch: bool) -> None:
    """60 % of the ids of this stream are named once, the others four times."""
    spec = count_filter(2, sketch=sketch)
    if sketch:
        spec = table(Entry("count_filter", (("threshold", 2),), SKETCH, 100_000))
    job = CountedJob(spec, num_shards=2)
    once, often = np.arange(6000), np.arange(10_000, 14_000)
    for part in np.array_split(once, 4):
        job.push(np.concatenate([part, often]))
    expected = 4000
    assert expected <= job.num_rows <= expected + (60 if sketch else 0)
    job.close()


# Refusals


@pytest.mark.parametrize(
    "said",
    [{}, {"show": floats(1), "click": floats(1)}, {**counts(1), "show": floats(1), "click": floats(1)}],
    ids=["none", "others", "more"],
)
def test_a_push_without_the_statistics_of_the_policy_is_refused(said: dict[str, np.ndarray]) -> None:
    spec = count_filter(2)
    with client_of(spec) as client:
        reply = client.push(push(spec, ids_of(7), floats([1, 1]), statistics=said))
        assert code_of(reply) is ErrorCode.SCHEMA
        assert "counts" in message_of(reply)


def test_statistics_for_a_table_without_a_policy_are_refused() -> None:
    spec = table(None)
    with client_of(spec) as client:
        reply = client.push(push(spec, ids_of(7), floats([1, 1]), statistics=counts(1)))
        assert code_of(reply) is ErrorCode.SCHEMA


def test_shows_that_are_not_finite_are_refused() -> None:
    spec = table(Entry("show_click"))
    with client_of(spec) as client:
        said = {"show": floats(np.inf), "click": floats(0)}
        reply = client.push(push(spec, ids_of(7), floats([1, 1]), statistics=said))
        assert code_of(reply) is ErrorCode.NOT_FINITE


def test_a_table_without_a_policy_has_no_counters() -> None:
    with client_of(table(None)) as client:
        (entry,) = client.shard.tables.values()
        assert entry.table.admission is None  # type: ignore[union-attr]
