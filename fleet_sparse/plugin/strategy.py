"""PserverStrategy, and the configuration that a Paddle `DistributedStrategy` stands for.

Every field of a strategy is obeyed, accepted with a line in the log that says why it changes nothing, or refused by
name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import paddle
from google.protobuf.message import Message
from paddle.distributed.fleet import DistributedStrategy

from fleet_sparse.core.cache_limits import CacheLimits
from fleet_sparse.core.mode import ALL_REDUCE, ASYNC, AVG, GEO, PSERVERS, SUM, SYNC, Dense, GradsDtype, Mode, Scale
from fleet_sparse.core.row_bound import DEFAULT_SHARE
from fleet_sparse.errors import PlanError

from .accepted_fields import OF_TABLES, reason_for, refused_table, settings_of_tables
from .accessor_config import AccessorConfig, read_accessors
from .optimizer_config import OptimizerConfig
from .row_cache import RowCache, check_row_cache, read_bound

logger = logging.getLogger(__name__)

OBEYED = {
    "a_sync",
    "a_sync_configs.k_steps",
    "gradient_scale_configs.scale_strategy",
    "trainer_desc_configs.local_sparse",
    "trainer_desc_configs.dump_fields",
    "trainer_desc_configs.dump_fields_path",
}
"""Fields of Paddle's strategy that change how pservers train."""

_INSTEAD = {
    "trainer_desc_configs.dump_param": "fetch the parameters: fetch_list=[...], or fetch_handler in "
    "exe.train_from_dataset",
}
"""Advice for refused fields, by field."""

# Values that mean the same as Paddle's default, by field.
_SAME_AS_DEFAULT = {"hybrid_configs.dp_degree": 1}

_TABLES = "downpour_table_param"  # of which `sparse_table_configs` is a view
_UNSEEN = "_fleet_sparse_unseen"


class PserverStrategy(DistributedStrategy):  # type: ignore[misc]  # Paddle's classes are untyped here
    """A `fleet.DistributedStrategy` with additional fields; give it to `fleet.distributed_optimizer`.

    ```python
    strategy = fleet_sparse.PserverStrategy(max_step_lag=4)
    strategy.a_sync = True
    ```

    Args:
        max_step_lag: Async training: number of steps that a worker may be ahead of the slowest one before its pulls
            wait. 0 is the step order of sync training; with None, the default, no worker waits.
        delta_scale: Geo training (`a_sync_configs["k_steps"]` above 0): "avg" adds each worker's change of a row
            divided by the number of workers, "sum" adds it undivided.
        examples_input: Sync training: name of the `paddle.static.data` whose first dimension is the number of examples
            of a batch. By default all inputs of the loss must have the same first dimension.
        strict_rules: Refuses optimizers and decays with which plain Paddle also changes rows that no batch contains, as
            `FLEET_SPARSE_STRICT_RULES=1` does for all programs.
        refuse_ids_past_size: Refuses a step whose new ids would give a table of `embedding(..., is_distributed=True)`
            more rows than its size. By default such a table grows, and a warning is logged. docs/consistency.md says
            how exact this is with several workers. Not with row caches, whose new rows the pservers do not know yet.
        dense: Sync training of several workers: where gradients of dense parameters are merged. "pservers", the
            default, merges and applies them like rows. With "all_reduce" the workers add them up with Gloo (on a GPU
            with NCCL) and Paddle's own optimizer ops train them on every worker. All workers still have equal values,
            but sums are not in worker order, so their last bits may depend on the number of workers; a worker that is
            killed at the wrong moment can take the others along without an error of ours; and this traffic has no keys.
            docs/consistency.md says more. With one worker it changes nothing.
        dense_embeddings: Names of weights, or patterns such as `user_*`, of `paddle.nn.Embedding(sparse=True)` and of
            `functional.embedding` with `sparse=True` that stay dense parameters. By default all of them are tables.
        max_row_lag: Each worker caches rows; one that a step trains on lacks at most this number of the updates that
            the other workers have made to it. 0 is no cache. docs/consistency.md says more of this and the next two.
        max_row_lag_share: With `max_row_lag`: such a row also lacks at most this share of all updates that it had, by
            default 1/4. None sets no such bound.
        max_row_drift: Each worker caches rows; the updates of the others that a row lacks have moved none of its values
            by more than this. Twice the learning rate of Adagrad or Adam is a good beginning.
        row_cache: Options of the caches; needs `max_row_lag` or `max_row_drift`.

    Raises:
        PlanError: A value has no meaning. A bound of row caches is checked by `minimize`.
    """

    def __init__(  # noqa: PLR0913 - each is a field
        self,
        *,
        max_step_lag: int | None = None,
        delta_scale: Scale = "avg",
        examples_input: str | None = None,
        strict_rules: bool = False,
        refuse_ids_past_size: bool = False,
        dense: Dense = PSERVERS,
        dense_embeddings: Sequence[str] = (),
        max_row_lag: int | None = None,
        max_row_lag_share: float | None = DEFAULT_SHARE,
        max_row_drift: float | None = None,
        row_cache: RowCache | None = None,
    ) -> None:
        self.max_step_lag = max_step_lag
        self.delta_scale = delta_scale
        self.examples_input = examples_input
        self.strict_rules = strict_rules
        self.refuse_ids_past_size = refuse_ids_past_size
        self.dense = dense
        self.dense_embeddings = dense_embeddings
        self.max_row_lag = max_row_lag
        self.max_row_lag_share = max_row_lag_share
        self.max_row_drift = max_row_drift
        self.row_cache = row_cache
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_step_lag" and not (value is None or (type(value) is int and value >= 0)):
            raise PlanError(f"PserverStrategy.max_step_lag: is {value!r}, should be a number of steps from 0, or None")
        if name == "delta_scale" and value not in ("avg", "sum"):
            raise PlanError(f"PserverStrategy.delta_scale: is {value!r}, should be 'avg' or 'sum'")
        if name == "dense" and value not in (PSERVERS, ALL_REDUCE):
            raise PlanError(f"PserverStrategy.dense: is {value!r}, should be {PSERVERS!r} or {ALL_REDUCE!r}")
        if name == "dense_embeddings" and (
            isinstance(value, str) or not all(isinstance(pattern, str) for pattern in value)
        ):
            raise PlanError(f"PserverStrategy.dense_embeddings: is {value!r}, should be a list of names")
        super().__setattr__(name, value)


class StrategyConfig(NamedTuple):
    """The configuration that a strategy stands for."""

    mode: Mode
    examples_input: str | None
    """This and the next fields are those of `PserverStrategy`."""
    strict_rules: bool
    refuse_ids_past_size: bool
    dense_embeddings: tuple[str, ...]
    dump: tuple[tuple[str, ...], str]
    """`trainer_desc_configs`: names of the fields that runs over data sets dump, and the directory."""
    accessors: Mapping[str, AccessorConfig]
    """`sparse_table_configs`, by name of the table."""
    row_cache: RowCache | None
    """Options of the row caches; None if workers cache no rows."""


def read_strategy(strategy: Any, dense_grads_dtype: GradsDtype = "float32") -> StrategyConfig:
    """Reads a `DistributedStrategy` or `PserverStrategy`.

    Args:
        strategy: The strategy.
        dense_grads_dtype: The setting of the job.

    Raises:
        PlanError: A field differs from Paddle's default and is not obeyed, or two fields contradict each other; the
            message names the field and says what to write.
    """
    _check_unsupported(strategy)
    trainer = strategy.strategy.trainer_desc_configs
    ours = strategy if isinstance(strategy, PserverStrategy) else PserverStrategy()
    scale = strategy.gradient_scale_configs["scale_strategy"]
    k_steps = strategy.a_sync_configs["k_steps"]
    is_geo = strategy.a_sync and k_steps > 0
    if scale not in (AVG, SUM):
        raise PlanError(
            f"DistributedStrategy.gradient_scale_configs['scale_strategy']: is {scale!r}, should be 'avg' or 'sum'. "
            "Scale the loss itself for anything else"
        )
    if scale == SUM and strategy.a_sync:
        raise PlanError(
            "DistributedStrategy.gradient_scale_configs['scale_strategy']: is 'sum' with a_sync = True, where every "
            "push is applied unscaled. Leave it out, or write a_sync = False"
        )
    _check_absent(
        ours.delta_scale != AVG and not is_geo, "PserverStrategy.delta_scale", ours.delta_scale, "k_steps above 0"
    )
    is_averaged = not strategy.a_sync and scale == AVG
    _check_absent(
        ours.examples_input is not None and not is_averaged,
        "PserverStrategy.examples_input",
        ours.examples_input,
        "a_sync = False and scale_strategy 'avg'",
    )
    _check_absent(
        ours.refuse_ids_past_size and is_geo,
        "PserverStrategy.refuse_ids_past_size",
        ours.refuse_ids_past_size,
        "k_steps of 0",
    )
    is_reduced = ours.dense == ALL_REDUCE
    _check_absent(is_reduced and strategy.a_sync, "PserverStrategy.dense", ours.dense, "a_sync = False")
    _check_absent(
        ours.refuse_ids_past_size and is_reduced,
        "PserverStrategy.refuse_ids_past_size",
        ours.refuse_ids_past_size,
        f"dense={PSERVERS!r}",
    )
    _check_absent(
        dense_grads_dtype != "float32" and (is_geo or is_reduced),
        "FLEET_SPARSE_DENSE_GRADS_DTYPE",
        dense_grads_dtype,
        "k_steps of 0" if is_geo else f"PserverStrategy(dense={PSERVERS!r})",
    )
    row_bound, row_cache = read_bound(
        ours.max_row_lag, ours.max_row_lag_share, ours.max_row_drift, ours.row_cache, is_geo=is_geo
    )
    _check_absent(
        ours.refuse_ids_past_size and row_cache is not None,  # which holds rows that pservers do not count
        "PserverStrategy.refuse_ids_past_size",
        ours.refuse_ids_past_size,
        "max_row_lag and max_row_drift of None",
    )
    if not strategy.a_sync:
        _check_absent(k_steps > 0, "DistributedStrategy.a_sync_configs['k_steps']", k_steps, "a_sync = True")
        _check_absent(ours.max_step_lag is not None, "PserverStrategy.max_step_lag", ours.max_step_lag, "a_sync = True")
        mode = Mode(SYNC, scale, dense=ours.dense, dense_grads_dtype=dense_grads_dtype, row_bound=row_bound)
    elif is_geo:
        _check_absent(ours.max_step_lag is not None, "PserverStrategy.max_step_lag", ours.max_step_lag, "k_steps of 0")
        mode = Mode(GEO, ours.delta_scale, None, k_steps)
    else:
        mode = Mode(ASYNC, max_step_lag=ours.max_step_lag, dense_grads_dtype=dense_grads_dtype, row_bound=row_bound)
    return StrategyConfig(
        mode,
        ours.examples_input,
        ours.strict_rules,
        ours.refuse_ids_past_size,
        dense_embeddings_of(strategy),
        (tuple(trainer.dump_fields), trainer.dump_fields_path),
        read_accessors(strategy.strategy.downpour_table_param),
        row_cache,
    )


def with_row_cache(
    strategy_config: StrategyConfig, optimizer: OptimizerConfig, num_workers: int, rows_dtype: str
) -> StrategyConfig:
    """Returns the configuration with the row cache that it has with this optimizer. Raises as `check_row_cache`."""
    mode = strategy_config.mode
    row_cache = check_row_cache(strategy_config.row_cache, mode, optimizer, num_workers, rows_dtype)
    if row_cache is not None and num_workers > 1 and mode.kind == SYNC:
        limits = CacheLimits(**{name: getattr(row_cache, name) for name in CacheLimits.__struct_fields__})
        mode = msgspec.structs.replace(mode, cache_limits=limits)
    return strategy_config._replace(mode=mode, row_cache=row_cache)


def dense_embeddings_of(strategy: Any) -> tuple[str, ...]:
    """Names, or patterns, of weights of sparse embeddings that stay dense parameters."""
    named = strategy.dense_embeddings if isinstance(strategy, PserverStrategy) else ()
    return (*named, *strategy.strategy.trainer_desc_configs.local_sparse)


def watched_build_strategy(stock: property) -> property:
    """Wraps `DistributedStrategy.build_strategy`, which drops some fields of the `BuildStrategy` that it is given.

    The wrapped property notes their names, so that `read_strategy` can refuse them.
    """

    def build_strategy(self: Any, value: Any) -> None:
        assert stock.fset is not None
        stock.fset(self, value)
        kept = {field.name for field in self.strategy.build_strategy.DESCRIPTOR.fields}
        default = paddle.static.BuildStrategy()
        names = {name for name in dir(value) if not name.startswith("_") and not callable(getattr(value, name))} - kept
        unseen = {name: getattr(value, name) for name in names if getattr(value, name) != getattr(default, name)}
        object.__setattr__(self, _UNSEEN, unseen)

    return stock.setter(build_strategy)


def _check_absent(is_present: bool, name: str, value: object, needs: str) -> None:
    if is_present:
        raise PlanError(f"{name}: is {value!r}, which has a meaning with {needs} only. Leave it out, or write that")


def _check_unsupported(strategy: Any) -> None:
    """Refuses every field that differs from Paddle's default and is neither obeyed nor accepted; logs the latter."""
    default = DistributedStrategy()
    default.build_strategy = paddle.static.BuildStrategy()  # its defaults are others than those of the message
    changed = list(_changes(strategy.strategy, default.strategy))
    changed += [(f"build_strategy.{name}", value) for name, value in getattr(strategy, _UNSEEN, {}).items()]
    for name in ("hybrid_parallel_order", "sync_param_name"):  # parts of hybrid_configs that are not in the message
        if getattr(strategy, name, None) != getattr(default, name, None):
            changed.append((name, getattr(strategy, name)))
    accepted: dict[str, list[str]] = {}  # fields by the reason why they change nothing; values may be secret
    for path, value in changed:
        if path == _TABLES:
            if refused := refused_table(value):
                raise PlanError(
                    f"DistributedStrategy.sparse_table_configs[{refused[0]!r}]: table_class is {refused[1]!r}, should "
                    "be 'MemorySparseTable': tables lie in the memory of the pservers. Leave it out"
                )
            if settings := settings_of_tables(value):
                accepted.setdefault(OF_TABLES, []).extend(settings)
        elif reason := reason_for(path):
            accepted.setdefault(reason, []).append(_keys_of(path))
        elif path not in OBEYED and _SAME_AS_DEFAULT.get(path) != value:
            instead = f", and {_INSTEAD[path]}" if path in _INSTEAD else ""
            raise PlanError(
                f"DistributedStrategy.{_keys_of(path)}: is {_text_of(value)} and is not supported with pservers. "
                f"Leave it out{instead}"
            )
    for reason, fields in accepted.items():
        logger.warning("DistributedStrategy.%s: is set and changes nothing: %s", ", ".join(fields), reason)


def _keys_of(path: str) -> str:
    """The field as a script writes it, `a_sync_configs['k_steps']`."""
    field, *keys = path.split(".")
    return path if field.startswith("build_") else field + "".join(f"[{key!r}]" for key in keys)


def _changes(message: Message, default: Message, path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of `message` that are set to another value than in `default`: dotted path and value."""
    for field, value in message.ListFields():
        name, expected = path + field.name, getattr(default, field.name)
        if isinstance(value, Message):
            yield from _changes(value, expected, f"{name}.")
        elif value != expected:
            yield name, value


def _text_of(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else " ".join(str(value).split())
