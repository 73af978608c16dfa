"""`minimize` of a fleet optimizer: rewrites and differentiates the program, and pushes its gradients to pservers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.core.bounds import UNBOUNDED
from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.core.entries import ENTRIES
from fleet_sparse.core.mode import ALL_REDUCE, AVG, GEO, PSERVERS, SUM, SYNC, Mode
from fleet_sparse.core.rules import RULES
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.plan import RewritePlan, plan_training
from fleet_sparse.transpiler.raw_op import OutSpec
from fleet_sparse.transpiler.scan import batch_inputs, parameters_of, scan
from fleet_sparse.transpiler.sparse_parameter import drop_initialization
from fleet_sparse.worker.modes.all_reduce import ReducedProgram
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.net.requests import max_dense_values

from ..catalog import READ_ONLY
from ..optimizer_config import OptimizerConfig, check_lazy, check_trust_ratio, read_optimizer
from ..paddle_support import check_flags
from ..row_cache import check_memory
from ..session import Session
from ..strategy import StrategyConfig, read_strategy, with_row_cache
from . import op_callbacks, programs
from .accumulators import accumulators_of, has_accumulators
from .added_gradients import summaries_of, with_added
from .dense_parameters import (
    DenseParameters,
    check_parameters,
    frozen_parameters,
    needs_clip,
    summed_parameters,
    trained_parameters,
)
from .fleet_opt import options_of
from .programs import fuse, note_trained
from .sequence_pool import declared_lengths
from .sparse_tables import tables_of
from .value_name import value_named

_Gradients = Sequence[tuple[pir.Value, pir.Value]]
_INTEGERS = (paddle.int64, paddle.int32, paddle.int16, paddle.int8, paddle.uint8, paddle.bool)


def minimize(
    session: Session,
    loss: pir.Value,
    optimizer: Any,
    strategy: Any,
    startup_program: pir.Program | None,
    no_grad_set: Any,
    *,
    num_pserver_processes: int,
    num_workers: int,
) -> tuple[list[Any], list[tuple[pir.Value, pir.Value]]]:
    """Makes the program of `loss` train on pservers. Every refusal is raised before the program is changed.

    Dense parameters of a job of one worker are trained by Paddle's optimizer in the program, if it has the rule; with
    `dense="all_reduce"` those of several workers, too.

    Returns:
        An empty list of optimizer ops, as Paddle's parameter server returns, and pairs of dense parameter and gradient.

    Raises:
        InstallError: A flag of Paddle was set with which training is wrong.
        PlanError: The program, optimizer or strategy asks for something that is not supported.
    """
    program = loss.block.program
    startup_program = startup_program or paddle.static.default_startup_program()
    check_flags()
    config, settings = read_optimizer(optimizer), session.settings
    strategy_config = with_row_cache(
        read_strategy(strategy, settings.dense_grads_dtype), config, num_workers, settings.rows_dtype
    )
    if strategy_config.dump[0]:
        options_of(program).update(zip(("dump_fields", "dump_fields_path"), strategy_config.dump, strict=True))
    layers = tables_of(program, startup_program, session.catalog.layers, strategy_config.dense_embeddings)
    plan = plan_training(scan(program, layers))
    check_memory(
        strategy_config.row_cache, config, [each.embedding.dim for each in plan.tables if each.embedding.is_trainable]
    )
    examples = _batch_inputs(loss, strategy_config)
    parameters = [parameter for parameter in _parameters(program) if parameter.name not in layers]
    trained = [parameter for parameter in parameters if _is_trained(parameter)]
    check_parameters(trained)
    session.catalog.check_untrained(parameter.name for parameter in trained)
    is_reduced = strategy_config.mode.dense == ALL_REDUCE and num_workers > 1
    if is_reduced:
        check_reduced(session, optimizer, config)
    check_geo(strategy_config.mode, config)
    check_trust_ratio(optimizer, (table.embedding for table in plan.tables))
    if num_pserver_processes and RULES[config.rule].needs_whole_row and strategy_config.mode.kind != SYNC:
        undeclared = [p for p in parameters if p.name not in session.catalog.dense_names()]
        _check_dense_sizes(
            undeclared,
            parameters_of(loss),
            config,
            num_pserver_processes - settings.row_shards or num_pserver_processes,
            max_dense_values(settings.max_frame_bytes),
        )
    check_lazy(
        config,
        (table.embedding for table in plan.tables),
        strict=strategy_config.strict_rules or session.settings.strict_rules,
    )
    _declare(session, program, strategy_config, config, plan)

    tables = fuse(session, program, plan, for_training=True) if plan.sites else ()
    _drop_parameters(session, layers, program, startup_program)
    forward, decays = rewrite.op_ids(program), summaries_of(program)
    trainable = [table for table in tables if table.plan.embedding.is_trainable]
    rows = [table.rows for table in trainable]
    params_grads = optimizer.backward(with_added(loss), startup_program, [*trained, *rows], no_grad_set)
    updated = [(table, g) for table in trainable if (g := _grad_of(table.rows, params_grads)) is not None]
    of_parameters = [(p, g) for p, g in params_grads if not any(p.is_same(row) for row in rows)]
    dense_grads = [(p, g) for p, g in of_parameters if p.name not in decays]
    is_shared = num_workers > 1 and strategy_config.mode.kind != GEO and not is_reduced
    summaries = _summaries(session, of_parameters, decays, is_local=not is_shared)
    is_alone = num_workers == 1 and strategy_config.mode.kind != GEO and has_accumulators(optimizer)
    with paddle.static.program_guard(program, startup_program):
        optimizer._create_global_learning_rate()
        step = _Step(
            updated,
            [parameter for parameter, _ in dense_grads],
            [grad for _, grad in dense_grads],
            _step_clip(config, updated, dense_grads, summaries),
            _statistics(program, [table for table, _ in updated]),
            examples,
            optimizer._global_learning_rate(),
            summaries,
        )
        dense = _dense_array(session, step.parameters, config)
        if dense is not None and (is_alone or is_reduced):
            _train_locally(session, step, dense, optimizer, config, is_reduced=is_reduced)
        elif updated or dense is not None or summaries:
            _train_on_pservers(session, step, dense)
    _freeze_others(session, parameters, {parameter.name for parameter, _ in of_parameters})
    rewrite.resolve(program, tables)
    rewrite.mark_train_only(program, lambda op: op.id() in forward)
    note_trained(session, program, startup_program)
    return [], dense_grads


def _declare(
    session: Session, program: pir.Program, strategy_config: StrategyConfig, config: OptimizerConfig, plan: RewritePlan
) -> None:
    """Declares the mode of the job and the tables of a program."""
    session.catalog.declare_mode(strategy_config.mode)
    session.catalog.declare_row_cache(strategy_config.row_cache)
    session.catalog.declare_accessors(strategy_config.accessors)
    if strategy_config.refuse_ids_past_size:
        for table in plan.tables:
            session.catalog.declare_size(table.embedding)
    for table in plan.tables:
        _inputs_named(program, table.embedding)
    for table in plan.tables:
        session.catalog.declare_table(table.embedding, config if table.embedding.is_trainable else READ_ONLY)


def _drop_parameters(
    session: Session, layers: dict[str, EmbeddingSpec], program: pir.Program, startup_program: pir.Program
) -> None:
    """Removes sparse parameters that are tables now, so that no process ever makes them."""
    session.catalog.declare_layers(layers)
    rewrite.remove_parameters(program, layers)
    drop_initialization(startup_program, layers)


class Statistics(NamedTuple):
    """Statistics of ids that the pushes of a program carry besides gradients."""

    of_tables: tuple[op_callbacks.TableStatistics | None, ...]
    """Statistics of each table; None for none."""
    inputs: list[pir.Value]
    """Values from which the update op computes them, table by table."""


class Summary(NamedTuple):
    """Parameters that the pservers add up, with one decay."""

    dense: DenseParameters
    parameters: list[pir.Value]
    of_batch: list[pir.Value]
    """What the batch adds to each."""


class _Step(NamedTuple):
    """The gradients of a program."""

    updated: list[tuple[rewrite.PrefetchedTable, pir.Value]]
    """Tables that are trained, and the gradient of their rows."""
    parameters: list[pir.Value]
    """Dense parameters that are trained."""
    grads: list[pir.Value]
    """Gradient of each of them."""
    clip: StepClip | None
    statistics: Statistics
    examples: dict[str, pir.Value]
    """The inputs whose first dimension is the number of examples, by name."""
    learning_rate: pir.Value
    summaries: tuple[Summary, ...] = ()

    def push(
        self,
        session: Session,
        dense_grads: list[pir.Value],
        outputs: list[OutSpec],
        *,
        dense: DenseParameters | None = None,
        local: DenseParameters | None = None,
        is_reduced: bool = False,
    ) -> tuple[pir.Value, ...]:
        """Inserts the update op; returns its outputs. Other arguments: see `rewrite` and `op_callbacks`."""
        of_tables = tuple(table.plan for table, _ in self.updated)
        arrays = (*(() if dense is None else (dense,)), *(summary.dense for summary in self.summaries))
        plan = op_callbacks.UpdatePlan(
            of_tables, arrays, local, is_reduced, self.statistics.of_tables, tuple(self.examples), self.clip
        )
        return rewrite.insert_update(
            [table for table, _ in self.updated],
            [grad for _, grad in self.updated],
            dense_grads,
            self.learning_rate,
            list(self.examples.values()),
            self.statistics.inputs,
            outputs,
            op_callbacks.update(session, plan),
        )


def _train_on_pservers(session: Session, step: _Step, dense: DenseParameters | None) -> None:
    """Inserts the op that pushes all gradients, and writes new values of the dense parameters."""
    dense = None if dense is None else session.catalog.declare_dense(dense)
    parameters = [*step.parameters, *(each for summary in step.summaries for each in summary.parameters)]
    grads = [*step.grads, *(each for summary in step.summaries for each in summary.of_batch)]
    outputs = [OutSpec(tuple(parameter.shape), "float32") for parameter in parameters]
    results = step.push(session, grads, outputs, dense=dense)
    if outputs:
        rewrite.overwrite(parameters, results)


def _train_locally(
    session: Session,
    step: _Step,
    dense: DenseParameters,
    optimizer: Any,
    config: OptimizerConfig,
    *,
    is_reduced: bool,
) -> None:
    """Inserts the op that pushes the gradients of rows, then Paddle's ops that train the dense parameters.

    With `is_reduced` they train with the merged gradients of all workers, which the op returns.
    """
    grads = step.grads
    read = grads if is_reduced or step.clip is not None else []
    outputs = [OutSpec(tuple(step.learning_rate.shape), "float32")]
    outputs += [OutSpec(shape if is_reduced else (), "float32") for shape in dense.shapes if read]
    learning_rate, *results = step.push(session, read, outputs, local=dense, is_reduced=is_reduced)
    if is_reduced:
        grads = results
    elif results:
        grads = [grad * factor for grad, factor in zip(grads, results, strict=True)]
    _apply_in_program(optimizer, config, list(zip(step.parameters, grads, strict=True)), learning_rate)
    accumulators = tuple(accumulators_of(optimizer, name) for name in dense.names)
    session.catalog.declare_dense(dense._replace(accumulators=accumulators))
    if is_reduced:
        tables = tuple(session.catalog.tables[table.plan.embedding.name] for table, _ in step.updated)
        session.catalog.declare_reduced(ReducedProgram(dense.spec, tables, step.clip))


def _apply_in_program(
    optimizer: Any, config: OptimizerConfig, dense_grads: list[tuple[pir.Value, pir.Value]], learning_rate: pir.Value
) -> None:
    """Inserts Paddle's ops that train dense parameters; gradients are clipped by norm already.

    They read `learning_rate`, an output of the update op, so that they run after it, and not at all if it refuses.
    """
    bounds = [config.bounds_of(needs_clip(parameter)) for parameter, _ in dense_grads]
    program = paddle.static.default_main_program()
    earlier = rewrite.op_ids(program)
    dense_grads = [
        (parameter, grad if each == UNBOUNDED else paddle.clip(grad, each.low, each.high))
        for (parameter, grad), each in zip(dense_grads, bounds, strict=True)
    ]
    clip, optimizer._grad_clip = optimizer._grad_clip, None  # Paddle 3.3 cannot clip by value here, and knows no tables
    try:
        optimizer.apply_gradients(dense_grads)
    finally:
        optimizer._grad_clip = clip
    rewrite.redirect(program, optimizer._global_learning_rate(), learning_rate, unchanged=earlier)


def _statistics(program: pir.Program, tables: list[rewrite.PrefetchedTable]) -> Statistics:
    """Statistics that the entry policies of the tables read."""
    of_tables: list[op_callbacks.TableStatistics | None] = []
    inputs: list[pir.Value] = []
    for table in tables:
        embedding = table.plan.embedding
        is_counted = embedding.entry is not None and ENTRIES[embedding.entry.policy].statistics
        if not is_counted and not embedding.has_show_click:
            of_tables.append(None)
            continue
        is_named = embedding.show_click is not None and not embedding.has_show_click
        show_click = _inputs_named(program, embedding) if is_named else []
        lengths = _lengths_of(program, table) if show_click else []
        has_lengths = tuple(each is not None for each in lengths)
        of_tables.append(op_callbacks.TableStatistics(len(table.positions), bool(show_click), has_lengths))
        inputs += [*table.positions, *show_click, *(each for each in lengths if each is not None)]
    return Statistics(tuple(of_tables), inputs)


def _inputs_named(program: pir.Program, embedding: EmbeddingSpec) -> list[pir.Value]:
    """The inputs with shows and clicks, or other values of the program with these names.

    Raises:
        PlanError: The program has no such value.
    """
    found = []
    for name in embedding.show_click or ():
        value = value_named(program, name)
        if value is None:
            ops = [op for op in program.global_block().ops if str(op.name()) == "pd_op.data"]
            inputs = ", ".join(sorted(repr(op.str_attr("name")) for op in ops))
            raise PlanError(
                f"table {embedding.name!r}: its entry reads input {name!r}, the program has {inputs or 'none'}. "
                "Declare it with paddle.static.data"
            )
        found.append(value)
    return found


def _lengths_of(program: pir.Program, table: rewrite.PrefetchedTable) -> list[pir.Value | None]:
    """Returns, for each lookup of a table in a ragged slot, the input with the number of ids of each example."""
    plan = programs.plan_of(program)
    assert plan is not None, "the lookups of the program were fused"
    fed_by = [plan.sites[site].fed_by for site in table.plan.sites]
    return [declared_lengths(program, names[0]) if len(names) == 1 else None for names in fed_by]


def _batch_inputs(loss: pir.Value, strategy_config: StrategyConfig) -> dict[str, pir.Value]:
    """The inputs whose first dimension is the number of examples, by name; none if it makes no difference."""
    if strategy_config.mode.kind != SYNC or strategy_config.mode.scale != AVG:
        return {}
    inputs = batch_inputs(loss)
    if strategy_config.examples_input is None:
        return inputs
    if strategy_config.examples_input not in inputs:
        raise PlanError(
            f"PserverStrategy.examples_input: is {strategy_config.examples_input!r}; the loss is computed from "
            f"{', '.join(map(repr, inputs)) or 'no input with a first dimension of -1'}"
        )
    return {strategy_config.examples_input: inputs[strategy_config.examples_input]}


def _step_clip(
    config: OptimizerConfig,
    updated: list[tuple[rewrite.PrefetchedTable, pir.Value]],
    dense_grads: list[tuple[pir.Value, pir.Value]],
    summaries: Sequence[Summary],
) -> StepClip | None:
    if config.clip is None or not config.clip.needs_norm:
        return None
    of_tables = [table.plan.embedding.need_clip for table, _ in updated]
    of_summaries = [False for summary in summaries for _ in summary.parameters]
    return StepClip(config.clip, (*of_tables, *(needs_clip(p) for p, _ in dense_grads), *of_summaries))


def _summaries(
    session: Session, params_grads: _Gradients, decays: Mapping[str, float], *, is_local: bool
) -> tuple[Summary, ...]:
    """Declares the parameters that are decaying sums: one array for each decay.

    Returns:
        Those that the pservers add up: none with `is_local`, when the program does.
    """
    summaries, sums = [], [(parameter, grad) for parameter, grad in params_grads if parameter.name in decays]
    for decay in sorted({decays[parameter.name] for parameter, _ in sums}):
        chosen = [(parameter, of_batch) for parameter, of_batch in sums if decays[parameter.name] == decay]
        parameters, of_batch = [p for p, _ in chosen], [each for _, each in chosen]
        name = f"summary.{len(session.catalog.dense)}"
        dense = session.catalog.declare_dense(summed_parameters(name, parameters, decay, is_local=is_local))
        if is_local:
            with paddle.static.program_guard(parameters[0].block.program):
                rewrite.overwrite(parameters, [p * decay + d for p, d in zip(parameters, of_batch, strict=True)])
        else:
            summaries.append(Summary(dense, parameters, of_batch))
    return tuple(summaries)


def check_geo(mode: Mode, config: OptimizerConfig) -> None:
    """Refuses a rule that geo training does not support."""
    if mode.kind == GEO and mode.scale == SUM and RULES[config.rule].follows_state:
        raise PlanError(
            f"PserverStrategy.delta_scale: is 'sum', and rule {config.rule!r} computes rows from its state alone, so "
            "that changes of several workers cannot be summed. Write 'avg'"
        )


def check_reduced(session: Session, optimizer: Any, config: OptimizerConfig) -> None:
    """Refuses what several workers cannot train with an all-reduce."""
    where, instead = f"PserverStrategy.dense: is {ALL_REDUCE!r}", f"Write dense={PSERVERS!r}, or leave it out"
    if not has_accumulators(optimizer):
        raise PlanError(f"{where}, and Paddle has no optimizer ops of rule {config.rule!r}. {instead}")
    if others := session.catalog.trained_names():
        raise PlanError(
            f"{where} with a second program that trains: another one trains {min(others)!r}, and workers at a barrier "
            f"could not know which of the two the others run. {instead}"
        )


def _check_dense_sizes(
    parameters: list[pir.Value], needed: set[str], config: OptimizerConfig, num_pservers: int, max_values: int
) -> None:
    """Refuses dense arrays of which a pserver's part does not fit into one frame, for a rule that needs whole arrays.

    Args:
        parameters: Parameters of the program that no other program declared.
        needed: Names of those that the loss is computed from.
        config: The optimizer.
        num_pservers: Number of pservers with dense values.
        max_values: Largest number of values per pserver.
    """
    floats = [parameter for parameter in parameters if parameter.dtype == paddle.float32]
    trained = [parameter for parameter in floats if parameter.name in needed and not parameter.stop_gradient]
    others = [parameter for parameter in floats if parameter.name not in {each.name for each in trained}]
    arrays = [trained_parameters("dense", trained, config)] if trained else []
    arrays += [frozen_parameters("frozen", others)] if others else []
    for array in arrays:
        ranges = [array.spec.range_of(shard, num_pservers) for shard in range(num_pservers)]
        largest = max(end - begin for begin, end in ranges)
        if largest > max_values:
            kind = "trained" if array.is_trained else "frozen"
            raise PlanError(
                f"minimize: the {kind} dense parameters have {largest} values on one of {num_pservers} pservers, "
                f"should be at most {max_values}, which fit into a frame, with rule {config.rule!r}. Set "
                f"FLEET_SPARSE_MAX_FRAME_BYTES to {4 * largest + (1 << 20)} for workers and pservers, or use more "
                "pservers"
            )


def _dense_array(session: Session, parameters: list[pir.Value], config: OptimizerConfig) -> DenseParameters | None:
    """Trained parameters as one array; None without parameters."""
    if not parameters:
        return None
    return trained_parameters(f"dense.{len(session.catalog.dense)}", parameters, config)


def _freeze_others(session: Session, parameters: list[pir.Value], trained: set[str]) -> None:
    """Declares other parameters as one frozen array, so that all workers begin with the same values."""
    known = trained | session.catalog.dense_names()
    frozen = [p for p in parameters if p.name not in known and p.dtype == paddle.float32]
    if frozen:
        session.catalog.declare_dense(frozen_parameters(f"kept.{len(session.catalog.dense)}", frozen))


def _is_trained(parameter: pir.Value) -> bool:
    """Returns whether a parameter can have a gradient: `paddle.assign` marks states of integers as if they had one."""
    return not parameter.stop_gradient and parameter.dtype not in _INTEGERS


def _parameters(program: pir.Program) -> list[pir.Value]:
    return sorted(program.global_block().all_parameters(), key=lambda parameter: str(parameter.name))


def _grad_of(value: pir.Value, params_grads: list[tuple[pir.Value, pir.Value]]) -> pir.Value | None:
    return next((grad for parameter, grad in params_grads if parameter.is_same(value)), None)
