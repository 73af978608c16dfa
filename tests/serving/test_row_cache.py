"""The cache of rows against a dict for each version."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import NO_VERSION, Version
from fleet_sparse.serving.row_cache import RowCache

SPECS = [TableSpec(name=name, dim=dim, rule="sgd", initializer=constant(0.0)) for name, dim in (("a", 1), ("b", 3))]
IDS = st.lists(st.sampled_from([-(2**63), -1, 0, *range(1, 30), 2**63 - 1]), max_size=20, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["read", "read", "switch", "skip", "late"]), st.sampled_from("ab"), IDS))


def rows_of(table: str, ids: list[int], changed_at: dict[tuple[str, int], int]) -> np.ndarray:
    dim = {spec.name: spec.dim for spec in SPECS}[table]
    rows = [[float(changed_at.get((table, id_), 0) * 1000 + id_ % 997)] * dim for id_ in ids]
    return np.array(rows, np.float32).reshape(-1, dim)


@given(STEPS, st.integers(1, 40))
def test_each_row_is_that_of_the_version(steps: list[tuple[str, str, list[int]]], capacity_rows: int) -> None:
    cache, number = RowCache(SPECS, capacity_rows), 1
    cache.switch(Version(1, 1), None)
    changed_at: dict[tuple[str, int], int] = {}
    for step, table, ids in steps:
        asked = np.array(ids, np.int64)
        if step == "read":
            rows, missing = cache.look_up({table: asked})
            found = np.setdiff1d(np.arange(len(ids)), missing[table])
            expected = rows_of(table, ids, changed_at)
            assert rows[table][found].tolist() == expected[found].tolist()
            cache.insert(Version(number, number), table, asked[missing[table]], expected[missing[table]])
        elif step == "late":  # rows of the version before arrive after the switch
            cache.insert(Version(number - 1, number - 1), table, asked, rows_of(table, ids, {}) - 1)
        else:
            number += 1
            changed_at |= {(table, id_): number for id_ in ids}
            cache.switch(Version(number, number), {table: asked} if step == "switch" else None)
        for each in cache.look_up({"a": np.arange(30), "b": np.arange(30)})[1].values():
            assert 30 - len(each) <= max(capacity_rows // 8, 1) * 8


def test_rows_that_are_used_stay() -> None:
    cache = RowCache(SPECS, 8)
    first = np.arange(8)
    cache.look_up({"a": first})
    cache.insert(NO_VERSION, "a", first, rows_of("a", first.tolist(), {}))
    for id_ in range(8, 20):
        assert cache.look_up({"a": first[:4]})[1]["a"].tolist() == []
        cache.insert(NO_VERSION, "a", np.array([id_]), np.array([[1.0]], np.float32))
    assert cache.look_up({"a": first[:4]})[1]["a"].tolist() == []
    assert (cache.num_hits, cache.num_misses) == (4 * 13, 8)
