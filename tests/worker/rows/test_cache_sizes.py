"""How caches divide their memory, and how many parts of a push they need."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.cache_sizes import capacities_of, most_change_bytes, num_flushes_of

JOB = CacheJob(RowBound(lag=30), 2, 0)


@st.composite
def tables(draw: st.DrawFn) -> list[TableSpec]:
    """Tables of different rules, dims and numbers of ids."""
    return [
        TableSpec(
            name=f"C{number}",
            dim=draw(st.sampled_from([1, 4, 64])),
            rule=draw(st.sampled_from(["sgd", "adagrad", "adam", "ftrl"])),
            initializer=constant(0.0),
            max_ids=draw(st.sampled_from([None, 10, 1000])),
        )
        for number in range(draw(st.integers(1, 4)))
    ]


@given(tables(), st.integers(1, 1 << 22), st.none() | st.integers(1, 2000), st.integers(1, 1 << 20))
def test_all_parts_of_a_flush_have_room_for_every_copy(
    specs: list[TableSpec], max_bytes: int, max_rows: int | None, part_bytes: int
) -> None:
    capacities = capacities_of(specs, JOB, max_bytes, max_rows)
    num_bytes = sum(most_change_bytes(spec) * capacities[spec.name] for spec in specs if spec.rule != "ftrl")
    assert num_flushes_of(specs, JOB, max_bytes, max_rows, part_bytes) * part_bytes >= num_bytes


@given(tables())
def test_the_number_of_parts_is_the_same_for_any_number_of_ids(specs: list[TableSpec]) -> None:
    unknown = [replace(spec, max_ids=None) for spec in specs]
    assert num_flushes_of(specs, JOB, 1 << 22, None, 1000) == num_flushes_of(unknown, JOB, 1 << 22, None, 1000)
