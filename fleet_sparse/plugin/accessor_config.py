"""AccessorConfig: what `DistributedStrategy.sparse_table_configs` says of the rows of one table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from fleet_sparse.core.criteria import MIN_SCORE, UNSEEN_DAYS, Criterion, checked
from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.core.entries import Entry
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.rules import ctr_adagrad, read_only
from fleet_sparse.core.table_spec import NUM_SHOW_CLICK
from fleet_sparse.errors import PlanError

from .optimizer_config import OptimizerConfig

_RULES = {
    "SparseNaiveSGDRule": "naive",
    "SparseAdaGradSGDRule": "adagrad",
    "StdAdaGradSGDRule": "adagrad",
    "SparseAdamSGDRule": "adam",
}
"""Paddle's update rules of rows, with the field that has the settings of each."""

OBEYED = (
    "embedx_threshold",
    *(
        f"ctr_accessor_param.{name}"
        for name in (
            "nonclk_coeff",
            "click_coeff",
            "base_threshold",
            "delta_keep_days",
            "show_click_decay_rate",
            "delete_threshold",
            "delete_after_unseen_days",
        )
    ),
)
"""Fields of an accessor that `read_accessors` obeys besides those of its update rule."""


class RowRule(NamedTuple):
    """An update rule of Paddle's pservers, which takes the place of the script's optimizer for one table."""

    name: str
    hyperparameters: tuple[tuple[str, float], ...]
    learning_rate: float
    initial_range: float
    """First values are uniform within plus and minus this."""


class AccessorConfig(NamedTuple):
    """Settings of one table; names are Paddle's. `read_accessors` makes them."""

    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    embedx_threshold: float | None = None
    """Threshold of a `ShowClickEntry`; None for its own."""
    base_threshold: float = 0.0
    delta_keep_days: int = 16
    show_click_decay_rate: float = 1.0
    delete_threshold: float = 0.0
    delete_after_unseen_days: int = 30
    rule: RowRule | None = None
    """None for the script's optimizer."""

    def applied(self, embedding: EmbeddingSpec, optimizer: OptimizerConfig) -> tuple[EmbeddingSpec, OptimizerConfig]:
        """A table and its optimizer, with what these settings change in them."""
        coefficients = {"click_coeff": self.click_coeff, "nonclick_coeff": self.nonclk_coeff}
        entry = embedding.entry
        if entry is not None and entry.policy == "show_click":
            threshold = {} if self.embedx_threshold is None else {"threshold": self.embedx_threshold}
            entry = entry._replace(settings=tuple((dict(entry.settings) | coefficients | threshold).items()))
        elif entry is None and embedding.has_show_click and self[:2] != AccessorConfig()[:2]:
            # Admits all ids: it is there for the coefficients of scores.
            entry = Entry("show_click", tuple((coefficients | {"threshold": 0.0}).items()))
        embedding = replace(embedding, entry=entry)
        if self.rule is None:
            return embedding, optimizer
        limit = self.rule.initial_range
        embedding = replace(embedding, initializer=uniform(-limit, limit) if limit else constant(0.0))
        if optimizer.rule == read_only.name:
            return embedding, optimizer
        hyperparameters = self.rule.hyperparameters
        if self.rule.name == ctr_adagrad.name and embedding.has_show_click:
            hyperparameters = (*hyperparameters, ("first", float(NUM_SHOW_CLICK)))
        return embedding, optimizer._replace(rule=self.rule.name, hyperparameters=hyperparameters)

    @property
    def shrunk(self) -> tuple[Criterion, ...]:
        """Rows that `fleet.shrink` removes."""
        return (
            Criterion(UNSEEN_DAYS, float(self.delete_after_unseen_days)),
            Criterion(MIN_SCORE, self.delete_threshold),
        )

    @property
    def left_out(self) -> tuple[Criterion, ...]:
        """Rows that are not in a base model, which is saved with mode 2."""
        return Criterion(UNSEEN_DAYS, float(self.delta_keep_days)), Criterion(MIN_SCORE, self.base_threshold)


def read_accessors(tables: Any) -> dict[str, AccessorConfig]:
    """Reads the repeated field `downpour_table_param`; by name of the table.

    Raises:
        PlanError: A value is outside of its range, or an update rule is unknown.
    """
    return {table.table_name: _read(table.table_name, table.accessor) for table in tables}


def obeyed_fields(accessor: Any) -> set[str]:
    """Dotted paths of the fields of an accessor that are obeyed."""
    names = set(OBEYED)
    if rule := _rule_field(accessor):
        names |= {f"{rule}.name"}
        sgd = getattr(accessor, rule)
        settings = _RULES.get(sgd.name, "")
        obeyed = (
            [field.name for field in sgd.DESCRIPTOR.fields_by_name[settings].message_type.fields] if settings else []
        )
        names |= {f"{rule}.{settings}.{name}" for name in obeyed if name != "weight_bounds" or settings == "adagrad"}
    return names


def _read(table: str, accessor: Any) -> AccessorConfig:
    given = {field.name: _number(value) for field, value in accessor.ctr_accessor_param.ListFields()}
    known: dict[str, Any] = {name: value for name, value in given.items() if name in AccessorConfig._fields}
    for name in ("delta_keep_days", "delete_after_unseen_days"):
        if name in known:
            known[name] = int(known[name])
    if accessor.HasField("embedx_threshold"):
        known["embedx_threshold"] = float(accessor.embedx_threshold)
    config = AccessorConfig(**known, rule=_read_rule(table, accessor))
    try:
        checked((*config.shrunk, *config.left_out), config.show_click_decay_rate)
    except ValueError as error:
        raise PlanError(f"DistributedStrategy.sparse_table_configs[{table!r}]: {error}") from None
    return config


def _rule_field(accessor: Any) -> str:
    """The field with the update rule of the table; empty for none. That of most values of a row comes first."""
    return next((name for name in ("embedx_sgd_param", "embed_sgd_param") if getattr(accessor, name).name), "")


def _read_rule(table: str, accessor: Any) -> RowRule | None:
    field = _rule_field(accessor)
    if not field:
        return None
    sgd = getattr(accessor, field)
    if sgd.name not in _RULES:
        raise PlanError(
            f"DistributedStrategy.sparse_table_configs[{table!r}]: {field}.name is {sgd.name!r}, should be one of "
            f"{', '.join(_RULES)}. Leave {field} out to train with the optimizer of the script"
        )
    settings = getattr(sgd, _RULES[sgd.name])
    rate, limit = _number(settings.learning_rate), _number(settings.initial_range)
    if _RULES[sgd.name] == "naive":
        return RowRule("sgd", (), rate, limit)
    if _RULES[sgd.name] == "adam":
        betas = (("beta1", _number(settings.beta1_decay_rate)), ("beta2", _number(settings.beta2_decay_rate)))
        return RowRule("adam", (*betas, ("epsilon", _number(settings.ada_epsilon))), rate, limit)
    low, high = settings.weight_bounds if len(settings.weight_bounds) == 2 else (-10.0, 10.0)
    hyperparameters = (
        ("initial_g2sum", _number(settings.initial_g2sum)),
        ("is_shared", float(sgd.name == "SparseAdaGradSGDRule")),
        ("weight_max", _number(high)),
        ("weight_min", _number(low)),
    )
    return RowRule(ctr_adagrad.name, hyperparameters, rate, limit)


def _number(value: float) -> float:
    """A float32 of a message as it was written: 0.98, not 0.9800000190734863."""
    return float(f"{value:.7g}")
