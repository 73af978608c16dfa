"""Entry policies and the specs of their counters."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.entries import ENTRIES, EXACT, SKETCH, STATISTICS, Entry, checked
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec

COUNT = Entry("count_filter", (("threshold", 3),))


def spec_of(entry: Entry | None = COUNT, **changes: object) -> TableSpec:
    fields = {"name": "emb", "dim": 2, "rule": "sgd", "initializer": constant(0.5), "entry": entry, **changes}
    return TableSpec(**fields)  # type: ignore[arg-type]


def admitted(entry: Entry, ids: NDArray[np.int64], totals: NDArray[np.float32]) -> NDArray[np.bool_]:
    policy, out = ENTRIES[entry.policy], np.full(len(ids), 7, np.uint8)
    scalars = policy.scalars(dict(checked(entry).settings))
    policy.kernel(hash_ids(ids, 5).view(np.int64), totals.reshape(-1), len(policy.statistics), scalars, out)
    assert set(out.tolist()) <= {0, 1}
    return out.view(np.bool_)


def test_a_count_filter_admits_from_its_threshold_on() -> None:
    totals = np.array([0, 2, 3, 255], np.float32)
    assert admitted(COUNT, np.arange(4), totals).tolist() == [False, False, True, True]


def test_a_count_filter_of_0_admits_every_id() -> None:
    assert admitted(Entry("count_filter", (("threshold", 0),)), np.arange(3), np.zeros(3, np.float32)).all()


def test_a_score_weighs_clicks_and_shows_without_a_click() -> None:
    totals = np.array([[100, 0], [99, 0], [10, 10], [11, 9.8], [10, 9]], np.float32)
    entry = Entry("show_click")
    assert admitted(entry, np.arange(5), totals).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_a_probability_admits_its_share_of_ids(share: float) -> None:
    ids = np.arange(100_000)
    found = admitted(Entry("probability", (("probability", share),)), ids, np.empty(0, np.float32))
    assert abs(found.mean() - share) < 0.01


def test_the_seed_of_a_probability_decides_which_ids() -> None:
    ids, nothing = np.arange(10_000), np.empty(0, np.float32)
    first, second = (admitted(Entry("probability", (("seed", seed),)), ids, nothing) for seed in (0, 1))
    assert 0.4 < (first == second).mean() < 0.6


def test_every_policy_has_known_statistics_in_order() -> None:
    for policy in ENTRIES.values():
        assert list(policy.statistics) == [name for name in STATISTICS if name in policy.statistics]
        assert [name for name, _ in policy.defaults] == sorted(name for name, _ in policy.defaults)


@pytest.mark.parametrize(
    ("entry", "facts"),
    [
        (Entry("lru"), ["'lru'", "count_filter", "probability", "show_click"]),
        (Entry("count_filter", (("limit", 1.0),)), ["'limit'", "threshold"]),
        (Entry("count_filter", (("threshold", -1.0),)), ["threshold", "-1"]),
        (Entry("count_filter", (("threshold", 1.5),)), ["threshold", "1.5"]),
        (Entry("count_filter", (("threshold", float("nan")),)), ["threshold", "nan"]),
        (Entry("probability", (("probability", 1.5),)), ["probability", "1.5"]),
        (Entry("probability", (("seed", -1.0),)), ["seed", "-1"]),
        (Entry("count_filter", (), "bloom"), ["'bloom'", "'exact'", "'sketch'"]),
        (Entry("count_filter", (), EXACT, 5), ["num_ids", "5"]),
        (Entry("count_filter", (), SKETCH), ["num_ids", "0"]),
        (Entry("count_filter", (("threshold", 256.0),), SKETCH, 5), ["255", "'exact'"]),
        (Entry("show_click", (), SKETCH, 5), ["'exact'"]),
        (Entry("probability", (), SKETCH, 5), ["'exact'"]),
    ],
)
def test_a_wrong_entry_is_refused(entry: Entry, facts: list[str]) -> None:
    with pytest.raises(ValueError, match="'emb'") as caught:
        spec_of(entry)
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_counters_lie_in_the_buckets_of_their_table() -> None:
    spec = spec_of()
    assert spec.counters is not None
    assert (spec.counters.name, spec.counters.dim, spec.counters.counts_for) == ("emb@entry", 1, "emb")
    assert spec.counters.salt == spec.salt
    assert spec.counters.table_id != spec.table_id
    assert spec.counters.statistics == ()
    assert spec.counters.counters is None


def test_specs_of_a_table_and_its_counters_are_read_back() -> None:
    spec = spec_of(Entry("count_filter", (("threshold", 3),), SKETCH, 1000))
    assert spec.counters is not None
    for each in (spec, spec.counters):
        assert parse_spec(each.to_json()) == each
    assert spec.counters.is_sketch
    assert not spec.is_sketch


def test_a_table_without_an_entry_has_the_json_of_before() -> None:
    assert "entry" not in spec_of(None).to_json()
    assert "counts_for" not in spec_of(None).to_json()


def test_an_entry_is_part_of_the_schema() -> None:
    assert spec_of().schema_hash != spec_of(None).schema_hash
    assert spec_of().differences(spec_of(None)) == ["entry count_filter(threshold=3) and None"]


@pytest.mark.parametrize("changes", [{"name": "emb@entry"}, {"counts_for": "emb"}, {"name": "x" * 123}])
def test_names_of_counters_are_reserved(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"@entry|counts_for"):
        spec_of(**changes)
