"""Notes on Programs that were rewritten, so that they can be run, evaluated and cloned as before.

The notes are not attributes of the Program: `Program.clone` would copy them, and they would be wrong on the clone.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from paddle.base.libpaddle import pir

from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.placeholder import is_placeholder
from fleet_sparse.transpiler.plan import RewritePlan, plan_evaluation
from fleet_sparse.transpiler.raw_op import Body
from fleet_sparse.transpiler.scan import ScannedProgram, scan
from fleet_sparse.transpiler.sparse_parameter import drop_initialization, initialized_by, sparse_parameters

from ..catalog import READ_ONLY
from ..paddle_support import check_flags
from ..session import Session
from . import op_callbacks
from .dense_parameters import DenseParameters
from .value_name import copy_names, value_named


@dataclass
class _Notes:
    is_trained: bool = False
    is_outside_fleet: bool = False
    """True if an optimizer that was not given to fleet trains it, or is a startup program of such a program."""
    dense: tuple[DenseParameters, ...] = ()
    """The dense arrays of which it has parameters, if it trains."""
    plan: RewritePlan | None = None
    """The plan by which its lookups are trained."""
    evaluation: Body | None = None
    """Body of the prefetch op of a copy that does not train; None if the Program has no such op."""
    replaced: list[tuple[pir.Value, pir.Value]] = field(default_factory=list)
    """Values of placeholder ops, which a user may still hold, and the values that replaced them."""
    tables: frozenset[str] = frozenset()
    """Names of the tables whose lookups were fused."""
    origin: Any = None
    """Paddle's mapping from the values of the original, if this is a copy."""
    seen: tuple[int, int] = (-1, -1)
    """Number of its ops, and of the tables that layers declare, at the last `to_run`."""
    has_lookups: bool = False
    joined: Any = None
    """A copy whose lookups are one prefetch, and which has no parameters of tables; None if the Program itself is run.
    """


_notes: WeakKeyDictionary[pir.Program, _Notes] = WeakKeyDictionary()


class RunnableProgram(NamedTuple):
    """The program that `Executor.run` runs in place of the one that the user named."""

    program: pir.Program
    has_lookups: bool
    is_trained: bool
    dense: tuple[DenseParameters, ...]
    """The dense arrays of which it has parameters, if it trains."""


def fuse(
    session: Session, program: pir.Program, plan: RewritePlan, *, for_training: bool
) -> tuple[rewrite.PrefetchedTable, ...]:
    """Fuses the lookups of `program` with `rewrite.fuse`, and notes what was replaced."""
    if for_training:
        _of(program).plan = plan
        _of(program).evaluation = op_callbacks.prefetch(session, plan, for_training=False)
    callback = op_callbacks.prefetch(session, plan, for_training=for_training)
    fused = rewrite.fuse(program, plan, callback, for_training=for_training)
    _of(program).replaced += fused.replaced
    _of(program).tables = frozenset(table.embedding.name for table in plan.tables)
    return fused.tables


def note_trained(session: Session, program: pir.Program, startup_program: pir.Program) -> None:
    """Notes that `program` was given to fleet and trains, after its dense arrays were declared."""
    session.note_minimized()
    _of(startup_program).is_outside_fleet = False
    notes, names = _of(program), {parameter.name for parameter in program.global_block().all_parameters()}
    notes.is_trained, notes.is_outside_fleet = True, False
    notes.dense = tuple(dense for dense in session.catalog.dense if not names.isdisjoint(dense.names))


def note_outside_fleet(*of_optimizer: pir.Program) -> None:
    """Notes a program, and its startup program, that an optimizer trains which was not given to fleet."""
    for program in of_optimizer:
        _of(program).is_outside_fleet = True


def is_outside_fleet(program: pir.Program) -> bool:
    """Returns whether an optimizer trains `program` which was not given to fleet."""
    return program in _notes and _notes[program].is_outside_fleet


def plan_of(program: pir.Program) -> RewritePlan | None:
    """Returns the plan by which the lookups of `program` are trained; None if it does not train."""
    return _notes[program].plan if program in _notes else None


def is_trained(program: pir.Program) -> bool:
    """Returns whether `program` trains."""
    return program in _notes and _notes[program].is_trained


def names_in(session: Session, program: pir.Program) -> set[str]:
    """Names of the tables and parameters of a program."""
    sites = scan(program, session.catalog.layers).sites
    tables = {*_of(program).tables, *(site.spec.embedding.name for site in sites)}
    return tables | {parameter.name for parameter in program.global_block().all_parameters()}


def pulls(session: Session, program: pir.Program) -> bool:
    """Returns whether `program` looks rows up on the pservers, rewritten or not."""
    return bool(scan(program, session.catalog.layers).sites) or rewrite.has_prefetch(program)


def to_run(session: Session, program: pir.Program) -> RunnableProgram:
    """The program itself or, if it has several lookups that were not minimized, a copy that pulls once for all.

    Declares the tables that nothing trains as read-only. The user's program is unchanged, so that it can still be
    minimized. Cheap unless the program has new ops.

    Raises:
        InstallError: A flag of Paddle was set with which training is wrong.
        PlanError: Two lookups contradict each other, or another program's declaration of their table.
    """
    notes = _of(program)
    layers = {} if notes.is_outside_fleet else session.catalog.layers
    if notes.seen != (program.num_ops(), len(layers)):
        sites = scan(program, layers).sites
        for site in sites:
            session.catalog.declare_table(site.spec.embedding, READ_ONLY)
        notes.has_lookups = bool(sites) or rewrite.has_prefetch(program)
        if notes.has_lookups:
            check_flags()  # they may have been set after install()
        if not notes.is_outside_fleet:
            _check_given(session, program)
        notes.joined = _joined(session, program, layers)
        notes.seen = program.num_ops(), len(layers)
    return RunnableProgram(notes.joined or program, notes.has_lookups, notes.is_trained, notes.dense)


def current(program: pir.Program, fetch: Any) -> Any:
    """The fetch list of a run of `program`, for the user's `fetch`: a value, a name, or lists of them.

    A name becomes its value; the value of a lookup that was replaced becomes the value that replaced it; a value of the
    original becomes that of the copy.

    Raises:
        PlanError: A value of the training part is fetched from a clone for test.
    """
    if isinstance(fetch, (list, tuple)):
        return [current(program, item) for item in fetch]
    fetch = own(program, fetch)
    joined = _notes[program].joined if program in _notes else None
    return fetch if joined is None or not isinstance(fetch, pir.Value) else current(joined, fetch)


def own(program: pir.Program, fetch: Any) -> Any:
    """The value of `program` itself for a value or a name, as `current`."""
    if isinstance(fetch, str):
        named = value_named(program, fetch)
        fetch = fetch if named is None else named
    notes = _notes.get(program)
    if notes is None or not isinstance(fetch, pir.Value):
        return fetch
    fetch = _replacement_of(fetch, notes)
    if notes.origin is not None and notes.origin.has(fetch):
        if fetch.get_defining_op().has_attr(rewrite.TRAIN_ONLY):
            raise PlanError(
                "fetch_list: a value is computed by the training part, which a clone for test does not have. "
                "Fetch it from the program that trains"
            )
        fetch = _replacement_of(notes.origin.look_up(fetch), notes)
    return fetch


def clone_for_test(program: pir.Program) -> pir.Program:
    """A copy of the forward part, in test mode; values of `program` may be fetched from it."""
    clone = _copy(program)
    rewrite.without_training(clone, _of(program).evaluation)
    _of(clone).replaced, _of(clone).tables = list(_of(program).replaced), _of(program).tables
    return clone


def _joined(session: Session, program: pir.Program, layers: Mapping[str, EmbeddingSpec]) -> pir.Program | None:
    scanned = scan(program, layers)
    of_layers = {site.spec.embedding.name for site in scanned.sites if not is_placeholder(site.op)}
    initialized = initialized_by(program, layers)
    if len(plan_evaluation(scanned).sites) < 2 and not of_layers and not initialized:
        return None
    _check_layers(program, scanned, of_layers)
    copy = _copy(program)
    plan = plan_evaluation(scan(copy, layers))
    if plan.sites:
        fuse(session, copy, plan, for_training=False)
    rewrite.remove_parameters(copy, of_layers)
    drop_initialization(copy, initialized)
    return copy


def _check_given(session: Session, program: pir.Program) -> None:
    """Refuses a program that would read its own values of a table that the pservers loaded."""
    for parameter in sparse_parameters(program):
        if parameter.name in session.undeclared_tables():
            raise PlanError(
                f"table {parameter.name!r}: it is on the pservers, and the embedding with sparse=True would read "
                "values of this process, because its program was not given to fleet. Give it, before init_worker, to "
                "fleet.distributed_optimizer(...).minimize(loss), or, to evaluate alone, to "
                "paddle.distributed.fleet.utils.DistributedInfer(program, startup_program)"
            )


def _check_layers(program: pir.Program, scanned: ScannedProgram, of_layers: Container[str]) -> None:
    """Refuses a program that also reads the weight of such a layer, which is a table on the pservers."""
    for parameter in sparse_parameters(program):
        if parameter.name in of_layers and parameter.other_users:
            raise PlanError(
                f"table {parameter.name!r}: {', '.join(sorted(set(parameter.other_users)))} reads the weight of an "
                "embedding whose rows are on the pservers, or looks them up inside control flow. Look up the rows of "
                "the ids before the control flow"
            )
    for site in scanned.sites:
        if site.spec.embedding.name in of_layers and site.ids_need:
            raise PlanError(
                f"{site}: its ids are computed from rows of another lookup. Write "
                "paddle.static.nn.embedding(..., is_sparse=True) in place of the layer"
            )


def _copy(program: pir.Program) -> pir.Program:
    mapping = pir.IrMapping()
    copy = program.clone(mapping)
    _of(copy).origin = mapping
    copy_names(program, copy)
    return copy


def _replacement_of(value: pir.Value, notes: _Notes) -> pir.Value:
    return next((new for old, new in notes.replaced if value.is_same(old)), value)


def _of(program: pir.Program) -> _Notes:
    return _notes.setdefault(program, _Notes())
