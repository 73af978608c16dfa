"""DygraphTraining: how dygraph layers look rows up, and what a step of the user's optimizer does."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import _C_ops
from paddle.base.layer_helper import LayerHelper
from paddle.distributed import fleet as fleet_module

from fleet_sparse.core.clip import scaled, squared_norms
from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.mode import ALL_REDUCE, AVG, GEO, SYNC
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.raw_op import Outputs
from fleet_sparse.worker.modes.all_reduce import ReducedProgram
from fleet_sparse.worker.modes.step import StepClip, check_finite
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import LookupGroup, TableLookups, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch

from ..active_session import active
from ..catalog import READ_ONLY
from ..optimizer_config import OptimizerConfig, check_lazy, check_trust_ratio, read_optimizer
from ..row_cache import check_memory
from ..session import Session
from ..static.accumulators import accumulators_of, has_accumulators
from ..static.dense_parameters import (
    DenseParameters,
    check_parameters,
    frozen_parameters,
    is_float32,
    needs_clip,
    trained_parameters,
)
from ..static.minimize import check_geo, check_reduced
from ..static.op_callbacks import statistics_of_ids
from ..strategy import StrategyConfig, read_strategy, with_row_cache
from .gradients import RowGradient, StepGradients, summed
from .scope import ParameterScope

logger = logging.getLogger(__name__)

_LOOKUP = "fleet_sparse.nn.Embedding"
_STEP = "optimizer.step"


class _FleetOptimizer(NamedTuple):
    """The optimizer that was given to fleet."""

    optimizer: Any
    config: OptimizerConfig
    strategy: StrategyConfig
    num_workers: int

    @property
    def is_reduced(self) -> bool:
        """True if the workers merge dense gradients."""
        return self.strategy.mode.dense == ALL_REDUCE and self.num_workers > 1

    @property
    def is_local(self) -> bool:
        """True if Paddle's optimizer trains dense parameters in this process."""
        is_alone = self.num_workers == 1 and self.strategy.mode.kind != GEO
        return self.is_reduced or (is_alone and has_accumulators(self.optimizer))


class Lookup(NamedTuple):
    """One lookup of ids in a table."""

    table: str
    """Name of a declared table."""
    padding_idx: int | None
    """Id that reads zeros and is not trained; None for none."""
    ids: Any
    """int64 or int32 tensor of any shape."""
    num_examples: int | None = None
    """Number of examples of the batch; None for the first dimension of `ids`."""

    def examples(self, shape: Sequence[int]) -> int:
        """Returns the number of examples, of ids of this shape."""
        if self.num_examples is not None:
            return self.num_examples
        return shape[0] if shape else 1


class DygraphTraining:
    """The tables, the optimizer and the dense parameters of dygraph code in this process.

    Used by one thread; backward passes may run on another one.

    Args:
        session: The session.

    Attributes:
        scope: The parameters, for dense synchronization.
        is_initialized: True if `fleet.init()` was called in dygraph.
        begin: Called once by the first lookup or step, to connect this worker; None if the script does it.
    """

    def __init__(self, session: Session) -> None:
        self.scope = ParameterScope()
        self.is_initialized = False
        self.begin: Callable[[], None] | None = None
        self._session = session
        self._tables: dict[str, EmbeddingSpec] = {}
        self._lookups: dict[str, TableLookups] = {}  # without padding
        self._gradients = StepGradients()
        self._num_examples: int | None = None
        self._fleet: _FleetOptimizer | None = None
        self._built: list[weakref.ref[Any]] = []  # optimizers that were built
        self._models: list[Any] = []
        self._dense: DenseParameters | None = None
        self._parameters: list[Any] = []  # those of `_dense`, in its order
        self._declared: set[str] = set()  # tables that the catalog has as they are trained
        self._has_declared_dense = False
        self._has_warned = False  # of gradients that are not cleared

    @property
    def is_job(self) -> bool:
        """True if this worker is connected, or will be with the first lookup, and dygraph uses pservers."""
        is_used = bool(self._tables or self._models) or self._fleet is not None
        return is_used and (self._session.is_connected or self.begin is not None)

    @property
    def optimizer(self) -> Any:
        """The optimizer that was given to fleet; None without one."""
        return None if self._fleet is None else self._fleet.optimizer

    # Before training

    def check_initialized(self, where: str) -> None:
        """Raises `PlanError` if `fleet.init()` was not called in dygraph; `where` begins the message."""
        if not self.is_initialized:
            raise PlanError(
                f"{where}: fleet.init() was not called in dygraph. Call fleet_sparse.install() and then "
                "fleet.init(), before the model is built"
            )

    def add_table(self, table: EmbeddingSpec) -> None:
        """Declares the table of a layer.

        Raises:
            PlanError: Another layer declares the table differently; or its entry reads inputs of a program.
        """
        if table.show_click is not None:
            raise PlanError(
                f"table {table.name!r}: its entry reads the inputs {', '.join(table.show_click)} of a program, which "
                "dygraph does not have. Write CountFilterEntry or ProbabilityEntry"
            )
        known = self._tables.setdefault(table.name, table)
        if known != table:
            fields = [name for name in EmbeddingSpec.__slots__ if getattr(known, name) != getattr(table, name)]
            raise PlanError(
                f"table {table.name!r}: another layer declares it with another {', '.join(fields)}. Give both layers "
                "the same arguments, or the tables different names"
            )
        self._lookups[table.name] = TableLookups(
            table.name, np.uint64(table_salt(table.name)), size=table.size if table.is_bounded else None
        )

    def use_model(self, model: Any) -> None:
        """Notes the model, whose parameters and buffers are saved, and loaded by a job that evaluates."""
        self._models.append(model)
        self.scope.add([*model.parameters(), *(each for each in model.buffers() if each.persistable)])

    def drop_parameter(self, weight: Any) -> None:
        """Forgets a parameter that became a table, so that its memory is released."""
        self.scope.remove(weight.name)
        if self._fleet is not None:
            optimizer = self._fleet.optimizer
            kept = [each for each in optimizer._parameter_list if each is not weight]
            optimizer._parameter_list = kept
            optimizer._param_groups = kept

    def use_optimizer(self, optimizer: Any, strategy: Any, num_workers: int) -> None:
        """Trains all tables, and the parameters of `optimizer`, with its rule.

        Raises:
            PlanError: The optimizer or strategy asks for something that is not supported, or another optimizer was
                given to fleet.
        """
        name = type(optimizer).__name__
        if self._fleet is not None and self._fleet.optimizer is not optimizer:
            raise PlanError(
                f"distributed_optimizer: {name} is the second optimizer in dygraph, and one trains all tables and "
                "parameters of a job. Give all parameters to one optimizer"
            )
        if any(isinstance(each, dict) for each in optimizer._parameter_list or ()):
            raise PlanError(
                f"optimizer {name}: parameters are groups with options of their own. Give a list of parameters, and "
                "learning rates and regularizers as ParamAttr"
            )
        config = read_optimizer(optimizer, has_parameters=True)
        settings = self._session.settings
        read = read_strategy(strategy, settings.dense_grads_dtype)
        read = with_row_cache(read, config, num_workers, settings.rows_dtype)
        if read.examples_input is not None:
            raise PlanError(
                "PserverStrategy.examples_input: dygraph has no named inputs. Leave it out, and call "
                "fleet_sparse.nn.set_num_examples(n) before optimizer.step()"
            )
        check_parameters(each for each in optimizer._parameter_list if not each.stop_gradient)
        fleet = _FleetOptimizer(optimizer, config, read, num_workers)
        if fleet.is_reduced:
            check_reduced(self._session, optimizer, config)
        check_geo(read.mode, config)
        optimizer.clear_gradients = optimizer.clear_grad  # Paddle's constructor bound one that knows no tables
        self._session.catalog.declare_accessors(read.accessors)
        self._session.catalog.declare_row_cache(read.row_cache)
        self._fleet = fleet
        self._session.note_minimized()

    def _rate_of(self, table: str, learning_rate: float) -> float:
        """The learning rate of a table, for that of the optimizer."""
        own = self._session.catalog.learning_rate_of(table)
        return (learning_rate if own is None else own) * self._tables[table].learning_rate

    def set_num_examples(self, num_examples: int) -> None:
        """States the number of examples of the step whose `optimizer.step()` follows."""
        self._num_examples = num_examples

    def prepare(self) -> None:
        """Declares what layers, models and the optimizer need and the catalog does not have. Cheap if there is none.

        Raises:
            PlanError: A table contradicts the optimizer, or what another program declares.
        """
        fleet = self._fleet
        missing = [table for name, table in self._tables.items() if name not in self._declared]
        if not missing and (self._has_declared_dense or fleet is None):
            return
        catalog = self._session.catalog
        if fleet is not None:
            is_strict = fleet.strategy.strict_rules or self._session.settings.strict_rules
            check_trust_ratio(fleet.optimizer, missing)
            check_lazy(fleet.config, missing, strict=is_strict)
            if not self._declared:
                trained = [table.dim for table in missing if table.is_trainable]
                check_memory(fleet.strategy.row_cache, fleet.config, trained)
            catalog.declare_mode(fleet.strategy.mode)
        for table in missing:
            if fleet is not None and fleet.strategy.refuse_ids_past_size:
                catalog.declare_size(table)
            catalog.declare_table(table, READ_ONLY if fleet is None or not table.is_trainable else fleet.config)
            if fleet is not None:
                self._declared.add(table.name)
        if fleet is not None and not self._has_declared_dense:
            self._declare_dense(fleet)
            self._has_declared_dense = True

    def _declare_dense(self, fleet: _FleetOptimizer) -> None:
        """Declares the trained parameters as one array, and those without a gradient as a frozen one."""
        catalog, optimizer = self._session.catalog, fleet.optimizer
        given = {each.name: each for each in optimizer._parameter_list}
        trained = sorted((each for each in given.values() if not each.stop_gradient), key=lambda each: str(each.name))
        check_parameters(trained)
        catalog.check_untrained(each.name for each in trained)
        self.scope.add(given.values())
        if trained:
            dense = trained_parameters(f"dense.{len(catalog.dense)}", trained, fleet.config)
            if fleet.is_local:
                _create_accumulators(optimizer, trained)
                self.scope.add(each for of_kind in optimizer._accumulators.values() for each in of_kind.values())
                accumulators = tuple(accumulators_of(optimizer, name) for name in dense.names)
                dense = dense._replace(accumulators=accumulators)
            self._dense, self._parameters = catalog.declare_dense(dense), trained
            if fleet.is_reduced:
                tables = [table for table in self._tables.values() if table.is_trainable]
                clip = self._step_clip(fleet, tables)
                specs = tuple(catalog.tables[table.name] for table in tables)
                catalog.declare_reduced(ReducedProgram(dense.spec, specs, clip))
        of_models = {each.name: each for model in self._models for each in (*model.parameters(), *model.buffers())}
        names = {each.name for each in trained} | catalog.dense_names()
        others = {**given, **of_models}
        frozen = [
            each
            for name, each in sorted(others.items())
            if name not in names and is_float32(each) and each.stop_gradient and each.persistable
        ]
        if frozen:
            self.scope.add(frozen)
            catalog.declare_dense(frozen_parameters(f"kept.{len(catalog.dense)}", [_Frozen(each) for each in frozen]))

    # Training

    def lookup(self, table: str, padding_idx: int | None, ids: Any, num_examples: int | None = None) -> Any:
        """Does what `look_up` does, for one lookup."""
        return self.look_up([Lookup(table, padding_idx, ids, num_examples)])[0]

    def look_up(self, lookups: Sequence[Lookup]) -> list[Any]:
        """Returns the rows of each lookup, of shape `ids.shape + [dim]`, from which gradients reach the table.

        Rows of all tables are pulled by one request to every shard.

        Raises:
            PlanError: `fleet.init()` was not called.
            FleetSparseError: Before `fleet.init_worker()`.
            ValueError: Ids are not integers, or one is outside of a bounded table.
        """
        session = self._session
        self.check_initialized(f"table {lookups[0].table!r}")
        self._begin()
        connection = session.connection(_LOOKUP)
        self.prepare()
        places: dict[str, list[int]] = {}  # of the lookups of each table
        for place, lookup in enumerate(lookups):
            places.setdefault(lookup.table, []).append(place)
        is_enabled = paddle.is_grad_enabled()
        trained = {table: is_enabled and self._tables[table].is_trainable for table in places}
        is_step = self._fleet is not None and any(trained.values())
        session.before_run(self.scope, trains=is_step)
        if is_step:
            connection.check_step()
            session.dense.share(connection, self.scope)
        ids = [lookup.ids.numpy() for lookup in lookups]
        positions = [_memory(array.shape, paddle.int64) for array in ids]
        in_order = [place for of_table in places.values() for place in of_table]
        placed = connection.deduplicator.place_tables(
            LookupGroup(
                [
                    self._lookups[table]._replace(paddings=tuple(lookups[place].padding_idx for place in of_table))
                    for table, of_table in places.items()
                ]
            ),
            [ids[place] for place in in_order],
            [positions[place].array for place in in_order],
        )
        rows, batches = [], []
        for table, unique in zip(places, placed, strict=True):
            num_rows = len(unique.ids)
            memory = _memory((num_rows + 1, self._tables[table].dim), paddle.float32)
            memory.array[num_rows] = 0  # of padding, and so that there is a row
            rows.append(memory)
            batches.append(RowBatch(session.catalog.tables[table], unique, memory.array[:num_rows]))
        if is_step:
            connection.training.prefetch(batches)
        else:
            connection.training.pull(batches)
        found: list[Any] = [None] * len(lookups)
        for (table, of_table), memory, batch in zip(places.items(), rows, batches, strict=True):
            weight = _on_device(memory.tensor)
            if trained[table]:
                statistics = []
                if batch.spec.statistics:
                    arrays = [positions[place].array for place in of_table]
                    statistics = statistics_of_ids(batch.spec, batch.unique, arrays, ())
                num_examples = frozenset(lookups[place].examples(ids[place].shape) for place in of_table)
                self._note_gradient(weight, table, batch.unique, statistics, num_examples)
            for place in of_table:
                found[place] = _C_ops.embedding(_on_device(positions[place].tensor), weight, -1, False)
        return found

    def _note_gradient(
        self, weight: Any, table: str, unique: UniqueIds, statistics: list[Any], num_examples: frozenset[int]
    ) -> None:
        """Makes the backward pass keep the gradient of `weight`, but no reference to it."""
        gradients, num_rows = self._gradients, len(unique.ids)

        def note(grad: Any) -> None:
            gradients.add(RowGradient(table, unique, grad.numpy()[:num_rows], statistics, num_examples))

        weight.stop_gradient = False
        weight.register_hook(note)

    def clear(self, tables: Container[str] | None = None) -> None:
        """Drops the gradients of rows of these tables, as `clear_grad` does those of parameters; None for all."""
        self._gradients.clear(tables)

    def note_built(self, optimizer: Any) -> None:
        """Notes an optimizer that was built; with `begin` it is given to fleet when the job begins."""
        self._built.append(weakref.ref(optimizer))

    def _begin(self) -> None:
        """Connects this worker, if the script leaves that to the first lookup."""
        begin, self.begin = self.begin, None
        if begin is None:
            return
        fleet = fleet_module.fleet
        for built in self._built:
            if (optimizer := built()) is not None:
                self.use_optimizer(optimizer, fleet._user_defined_strategy, fleet._runtime_handle.num_workers)
        begin()

    def refuse(self, optimizer: Any) -> NoReturn:
        """Refuses a step of an optimizer that does not train the tables.

        Raises:
            PlanError: The optimizer was not given to fleet.
        """
        raise PlanError(
            f"optimizer.step: this {type(optimizer).__name__} was not given to fleet, so that tables are not trained "
            "and every worker trains alone. Write optimizer = fleet.distributed_optimizer(optimizer, strategy)"
        )

    def step(self, stock_step: Any) -> None:
        """Ends a training step: pushes the gradients of rows, and trains the dense parameters.

        Args:
            stock_step: Paddle's own `step` of the optimizer, without arguments.

        Raises:
            PushRefused: A gradient is not finite. Nothing is trained.
            PlanError: Sync training of several workers, and the number of examples is unknown.
            FleetSparseError: Before `fleet.init_worker()`, or an earlier push failed.

        If Paddle's own step raises, rows are trained and dense parameters are not, which is logged: a push is refused
        before dense parameters change, and so comes first.
        """
        session, fleet = self._session, self._fleet
        assert fleet is not None, "only the optimizer of fleet steps here"
        connection = session.connection(_STEP)
        gradients, num_examples = self._gradients.of_step(), self._num_examples
        self._num_examples = None
        if self._gradients.has_pushed:
            self._warn_of_uncleared()
            gradients = self._summed(gradients)
        self.prepare()
        dense = [] if self._dense is None else [self._dense]
        session.before_run(self.scope, trains=True)
        session.before_training(self.scope, dense)
        session.dense.share(connection, self.scope)
        with session.dense.step(self.scope, dense):
            rows = self._rows(gradients, fleet)
            examples = self._examples_of(gradients, num_examples, fleet)
            if fleet.is_local and self._dense is not None:
                self._step_locally(fleet, self._dense, rows, examples, stock_step)
            else:
                self._step_on_pservers(fleet, rows, examples)
        self._gradients.note_pushed(gradients)
        session.after_run(self.scope, has_lookups=True, trains=True)

    def _warn_of_uncleared(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "optimizer.step: gradients of rows that an earlier step pushed are pushed again, as Paddle does with "
                "those of parameters. Call optimizer.clear_grad() after each step"
            )

    def _summed(self, gradients: Sequence[RowGradient]) -> list[RowGradient]:
        """Returns one gradient for each table, so that their number does not grow with that of the steps."""
        of_table: dict[str, list[RowGradient]] = {}
        for gradient in gradients:
            of_table.setdefault(gradient.table, []).append(gradient)
        deduplicator, specs = self._session.connection(_STEP).deduplicator, self._session.catalog.tables
        found = []
        for name, each in of_table.items():
            batch = summed(deduplicator, self._lookups[name], specs[name], each)
            num_examples = frozenset().union(*(gradient.num_examples for gradient in each))
            found.append(RowGradient(name, batch.unique, batch.values, batch.statistics, num_examples))
        return found

    def _rows(self, gradients: Sequence[RowGradient], fleet: _FleetOptimizer) -> list[RowBatch]:
        """The gradient of each table that was looked up; in sync training with several workers of each one."""
        of_table: dict[str, list[RowGradient]] = {}
        if fleet.strategy.mode.kind == SYNC and fleet.num_workers > 1:
            of_table = {name: [] for name, table in self._tables.items() if table.is_trainable}
        for gradient in gradients:
            of_table.setdefault(gradient.table, []).append(gradient)
        deduplicator = self._session.connection(_STEP).deduplicator
        learning_rate, specs = _learning_rate(fleet.optimizer), self._session.catalog.tables
        return [
            summed(deduplicator, self._lookups[name], specs[name], each)._replace(
                learning_rate=self._rate_of(name, learning_rate)
            )
            for name, each in sorted(of_table.items())
        ]

    def _examples_of(self, gradients: Sequence[RowGradient], num_examples: int | None, fleet: _FleetOptimizer) -> float:
        """The weight of this worker's gradients in the average of a step."""
        mode = fleet.strategy.mode
        if mode.kind != SYNC or mode.scale != AVG or fleet.num_workers == 1:
            return 1.0
        if num_examples is not None:
            return float(num_examples)
        found = {number for each in gradients for number in each.num_examples}
        if len(found) > 1:
            raise PlanError(
                f"sync training: ids have different first dimensions ({', '.join(map(str, sorted(found)))}), so the "
                "number of examples is unknown. Call fleet_sparse.nn.set_num_examples(n) before optimizer.step()"
            )
        return float(next(iter(found), 1))

    def _step_clip(self, fleet: _FleetOptimizer, tables: Sequence[EmbeddingSpec]) -> StepClip | None:
        clip = fleet.config.clip
        if clip is None or not clip.needs_norm:
            return None
        of_tables = [table.need_clip for table in tables]
        return StepClip(clip, (*of_tables, *(needs_clip(parameter) for parameter in self._parameters)))

    def _step_locally(
        self,
        fleet: _FleetOptimizer,
        dense: DenseParameters,
        rows: list[RowBatch],
        num_examples: float,
        stock_step: Any,
    ) -> None:
        """Pushes rows, then Paddle's own optimizer trains the dense parameters."""
        session, name, optimizer = self._session, dense.spec.name, fleet.optimizer
        clip = self._step_clip(fleet, [self._tables[batch.spec.name] for batch in rows])
        grads: list[tuple[Any, Any]] = []  # that take the place of those of the parameters
        if fleet.is_reduced:
            merged = np.empty(dense.spec.num_values, np.float32)
            parts = _parts(dense, merged)
            update = DenseUpdate(dense.spec, self._dense_grads(), parts, _learning_rate(optimizer))
            session.update(rows, [update], num_examples, None, local_array=name)
            grads = [(each, paddle.to_tensor(part)) for each, part in zip(self._parameters, parts, strict=True)]
            if clip is None and optimizer._grad_clip is not None:
                grads = optimizer._grad_clip(grads)
        else:
            if clip is not None:
                rows, grads = self._clipped(clip, rows)
            check_finite(rows, ())  # before the dense parameters change
            session.update(rows, (), 1.0, None, local_array=name)
        of_user = optimizer._grad_clip
        if fleet.is_reduced or clip is not None:
            optimizer._grad_clip = lambda _: grads
        try:
            stock_step()
        except BaseException:
            logger.error(  # the caller gets the error itself
                "optimizer.step: Paddle's optimizer failed after the gradients of rows were pushed. Rows are trained "
                "by this step, and dense parameters are not. Load a snapshot before training continues"
            )
            raise
        finally:
            optimizer._grad_clip = of_user

    def _step_on_pservers(self, fleet: _FleetOptimizer, rows: list[RowBatch], num_examples: float) -> None:
        """Pushes all gradients, and writes new values of the dense parameters."""
        clip = self._step_clip(fleet, [self._tables[batch.spec.name] for batch in rows])
        dense = self._dense
        if dense is None:
            self._session.update(rows, (), num_examples, clip)
            return
        values = np.empty(dense.spec.num_values, np.float32)
        update = DenseUpdate(dense.spec, self._dense_grads(), _parts(dense, values), _learning_rate(fleet.optimizer))
        self._session.update(rows, [update], num_examples, clip)
        dense.write(self.scope, values)

    def _dense_grads(self) -> NDArray[np.float32]:
        """The gradients of all dense parameters as one array; zeros for a parameter without one."""
        return np.concatenate([np.empty(0, np.float32), *(_grad_of(each).reshape(-1) for each in self._parameters)])

    def _clipped(self, clip: StepClip, rows: list[RowBatch]) -> tuple[list[RowBatch], list[tuple[Any, Any]]]:
        """Clips by norm: returns the rows, and the parameters that have a gradient with their clipped one."""
        grads = [batch.values for batch in rows]
        dense = [_grad_of(parameter) for parameter in self._parameters]
        factors = clip.clip.factors(squared_norms([*grads, *dense], ()), clip.needs_clip)
        pairs = zip(self._parameters, factors[len(rows) :], strict=True)
        of_dense = [(each, each.grad * float(factor)) for each, factor in pairs if each.grad is not None]
        of_rows, _ = scaled(grads, (), factors)
        clipped = [batch._replace(values=values) for batch, values in zip(rows, of_rows, strict=True)]
        return clipped, of_dense


_trainings: WeakKeyDictionary[Session, DygraphTraining] = WeakKeyDictionary()


def training() -> DygraphTraining:
    """The dygraph training of the session of this process."""
    session = active()
    if session not in _trainings:
        _trainings[session] = DygraphTraining(session)
    return _trainings[session]


def current_scope() -> Any:
    """Scope of the dense parameters: dygraph's while Paddle is in dygraph mode, else Paddle's global scope."""
    return training().scope if paddle.in_dynamic_mode() else paddle.static.global_scope()


class _Frozen:
    """A tensor without a gradient, as `frozen_parameters` reads it: buffers have no attributes of parameters."""

    def __init__(self, tensor: Any) -> None:
        self.name, self.shape = tensor.name, tensor.shape
        self.optimize_attr: Mapping[str, float] = {}
        self.need_clip = True


def _create_accumulators(optimizer: Any, parameters: Sequence[Any]) -> None:
    """Creates the accumulators that Paddle's optimizer would create in its first step."""
    optimizer.helper = LayerHelper(type(optimizer).__name__)
    block = paddle.static.default_main_program().global_block()
    optimizer._create_accumulators(block, parameters)


def _learning_rate(optimizer: Any) -> float:
    return float(np.float32(optimizer.get_lr()))


def _grad_of(parameter: Any) -> NDArray[np.float32]:
    grad = parameter._grad_ivar()
    if grad is None:
        return np.zeros(parameter.shape, np.float32)
    if grad.is_selected_rows():
        raise PlanError(
            f"parameter {parameter.name!r}: its gradient has rows of an embedding with sparse=True, which is named in "
            "dense_embeddings. Write sparse=False there, or leave its name out"
        )
    values: NDArray[np.float32] = grad.numpy()
    return values


def _parts(dense: DenseParameters, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """The places of the parameters in `values`, in their shapes."""
    segments = zip(dense.spec.segments, dense.shapes, strict=True)
    return [values[each.offset : each.offset + each.size].reshape(shape) for each, shape in segments]


def _memory(shape: Sequence[int], dtype: Any) -> Any:
    return Outputs((dtype,)).reserve(0, shape)


def _on_device(tensor: Any) -> Any:
    place = paddle.framework._current_expected_place()
    return tensor if place.is_cpu_place() else tensor._copy_to(place, True)
