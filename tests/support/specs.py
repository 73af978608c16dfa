"""A spec of each kind, and strategies that draw others."""

from __future__ import annotations

from hypothesis import strategies as st

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant, normal, truncated_normal, uniform
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec

TABLE = TableSpec(name="C1", dim=16, rule="adagrad", initializer=uniform(-0.01, 0.01), seed=7, max_ids=10)
DENSE = DenseSpec("dense", "sgd", (), (Segment("w", 0, 6, 1.0), Segment("b", 6, 2, 2.0)))

_names = st.text("abcXYZ019_.@/-", min_size=1, max_size=128)
_numbers = st.floats(-1e6, 1e6)
_rules = st.sampled_from(sorted(RULES)).flatmap(
    lambda rule: st.tuples(
        st.just(rule),
        st.fixed_dictionaries({}, optional={name: _numbers for name, _ in RULES[rule].defaults}).map(
            lambda values: tuple(values.items())
        ),
    )
)
_initializers = st.one_of(
    _numbers.map(constant),
    st.tuples(_numbers, _numbers).map(lambda pair: uniform(min(pair), max(pair))),
    st.tuples(_numbers, st.floats(0, 10)).map(lambda pair: normal(*pair)),
    st.floats(0.1, 10).map(lambda std: truncated_normal(0, std, -2 * std, std)),
)


@st.composite
def table_specs(draw: st.DrawFn) -> TableSpec:
    rule, hyperparameters = draw(_rules)
    return TableSpec(
        name=draw(_names),
        dim=draw(st.integers(1, 65535)),
        rule=rule,
        hyperparameters=hyperparameters,
        initializer=draw(_initializers),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_ids=draw(st.none() | st.integers(1, 2**64)),
    )


@st.composite
def dense_specs(draw: st.DrawFn) -> DenseSpec:
    rule, hyperparameters = draw(_rules)
    sizes = draw(st.lists(st.integers(1, 10**9), min_size=1, max_size=5))
    segments = [Segment(f"p{i}", sum(sizes[:i]), size, draw(_numbers)) for i, size in enumerate(sizes)]
    return DenseSpec(draw(_names), rule, hyperparameters, tuple(segments))
