"""Notes on Programs that were rewritten, so that they can be run, evaluated and cloned as before.

The notes are not attributes of the Program: `Program.clone` would copy them, and they would be wrong on the clone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.plan import RewritePlan, plan_evaluation
from fleet_sparse.transpiler.raw_op import Body
from fleet_sparse.transpiler.scan import scan

from ..catalog import READ_ONLY
from ..paddle_support import check_flags
from ..session import Session
from . import op_callbacks
from .dense_parameters import DenseParameters


@dataclass
class _Notes:
    is_trained: bool = False
    dense: tuple[DenseParameters, ...] = ()
    """The dense arrays of which it has parameters, if it trains."""
    plan: RewritePlan | None = None
    """How its lookups are trained."""
    evaluation: Body | None = None
    """Body of the prefetch op of a copy that does not train; None if the Program has no such op."""
    replaced: list[tuple[pir.Value, pir.Value]] = field(default_factory=list)
    """Values of placeholder ops, which a user may still hold, and the values that replaced them."""
    origin: Any = None
    """On a copy: Paddle's mapping from the values of the original."""
    num_ops_seen: int = -1
    """Number of its ops at the last `to_run`."""
    has_lookups: bool = False
    joined: Any = None
    """A copy whose lookups are one prefetch; None if the Program itself is run."""


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
    return fused.tables


def note_trained(session: Session, program: pir.Program) -> None:
    """Notes that `program` trains, after its dense arrays were declared."""
    notes, names = _of(program), {parameter.name for parameter in program.global_block().all_parameters()}
    notes.is_trained = True
    notes.dense = tuple(dense for dense in session.catalog.dense if not names.isdisjoint(dense.names))


def plan_of(program: pir.Program) -> RewritePlan | None:
    """How the lookups of `program` are trained; None if it does not train."""
    return _notes[program].plan if program in _notes else None


def is_trained(program: pir.Program) -> bool:
    """Returns whether `program` trains."""
    return program in _notes and _notes[program].is_trained


def names_in(program: pir.Program) -> set[str]:
    """Names of the tables and dense parameters of a program that trains."""
    plan = plan_of(program)
    tables = set() if plan is None else {table.embedding.name for table in plan.tables}
    return tables | {parameter.name for parameter in program.global_block().all_parameters()}


def has_lookups(program: pir.Program) -> bool:
    """Returns whether `program` looks rows up, rewritten or not."""
    return bool(scan(program).sites) or rewrite.has_prefetch(program)


def to_run(session: Session, program: pir.Program) -> RunnableProgram:
    """The program itself or, if it has several lookups that were not minimized, a copy that pulls once for all.

    Declares the tables that nothing trains as read-only. The user's program is unchanged, so that it can still be
    minimized. Cheap unless the program has new ops.

    Raises:
        InstallError: A flag of Paddle was set with which training is wrong.
        PlanError: Two lookups contradict each other, or another program's declaration of their table.
    """
    notes = _of(program)
    if notes.num_ops_seen != program.num_ops():
        for site in scan(program).sites:
            session.catalog.declare_table(site.spec.embedding, READ_ONLY)
        notes.has_lookups = has_lookups(program)
        if notes.has_lookups:
            check_flags()  # they may have been set after install()
        notes.joined = _joined(session, program)
        notes.num_ops_seen = program.num_ops()
    return RunnableProgram(notes.joined or program, notes.has_lookups, notes.is_trained, notes.dense)


def current(program: pir.Program, fetch: Any) -> Any:
    """The fetch list of a run of `program`, for the user's `fetch`: a value, a name, or lists of them.

    The value of a placeholder op becomes the value that replaced it; a value of the original becomes that of the copy.

    Raises:
        PlanError: A value of the training part is fetched from a clone for test.
    """
    if isinstance(fetch, (list, tuple)):
        return [current(program, item) for item in fetch]
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
    return fetch if notes.joined is None else current(notes.joined, fetch)


def clone_for_test(program: pir.Program) -> pir.Program:
    """A copy of the forward part, in test mode; values of `program` may be fetched from it."""
    clone = _copy(program)
    rewrite.without_training(clone, _of(program).evaluation)
    _of(clone).replaced = list(_of(program).replaced)
    return clone


def _joined(session: Session, program: pir.Program) -> pir.Program | None:
    if len(plan_evaluation(scan(program)).sites) < 2:
        return None
    copy = _copy(program)
    fuse(session, copy, plan_evaluation(scan(copy)), for_training=False)
    return copy


def _copy(program: pir.Program) -> pir.Program:
    mapping = pir.IrMapping()
    copy = program.clone(mapping)
    _of(copy).origin = mapping
    return copy


def _replacement_of(value: pir.Value, notes: _Notes) -> pir.Value:
    return next((new for old, new in notes.replaced if value.is_same(old)), value)


def _of(program: pir.Program) -> _Notes:
    return _notes.setdefault(program, _Notes())
