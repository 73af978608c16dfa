"""What is remembered of each Program that was rewritten, so that it can be run, evaluated and cloned as before.

Notes are kept beside a Program, not on it: `Program.clone` would copy attributes, and they would be wrong there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.plan import Plan, plan_evaluation
from fleet_sparse.transpiler.scan import scan

from . import op_callbacks


@dataclass
class _Notes:
    is_trained: bool = False
    plan: Plan | None = None
    """Of its training."""
    replaced: list[tuple[pir.Value, pir.Value]] = field(default_factory=list)
    """Values of markers, which a user may still hold, and what took their places."""
    origin: Any = None
    """Of a copy: Paddle's mapping from the values of the original."""
    num_ops_seen: int = -1
    """Ops it had when `to_run` last looked at it."""
    has_lookups: bool = False
    joined: Any = None
    """A copy whose lookups are one prefetch; None if it is run as it is."""


_notes: WeakKeyDictionary[pir.Program, _Notes] = WeakKeyDictionary()


class ToRun(NamedTuple):
    """What `Executor.run` is to run where the user named a program."""

    program: pir.Program
    has_lookups: bool
    is_trained: bool


def fuse(program: pir.Program, plan: Plan, *, for_training: bool) -> tuple[rewrite.Prefetched, ...]:
    """`rewrite.fuse` with our body, remembered."""
    if for_training:
        _of(program).plan = plan
    rewritten = rewrite.fuse(
        program, plan, op_callbacks.prefetch(plan, for_training=for_training), for_training=for_training
    )
    _of(program).replaced += rewritten.replaced
    return rewritten.tables


def note_trained(program: pir.Program) -> None:
    """Remembers that `program` trains."""
    _of(program).is_trained = True


def plan_of(program: pir.Program) -> Plan | None:
    """How the lookups of `program` train; None if they do not."""
    return _notes[program].plan if program in _notes else None


def is_trained(program: pir.Program) -> bool:
    """Whether `note_trained` was called for it."""
    return program in _notes and _notes[program].is_trained


def names_in(program: pir.Program) -> set[str]:
    """The tables and dense parameters of a program that trains."""
    plan = plan_of(program)
    tables = set() if plan is None else {table.spec.table for table in plan.tables}
    return tables | {parameter.name for parameter in program.global_block().all_parameters()}


def has_lookups(program: pir.Program) -> bool:
    """Whether `program` looks rows up, rewritten or not."""
    return bool(scan(program).sites) or rewrite.has_prefetch(program)


def to_run(program: pir.Program) -> ToRun:
    """The program itself; or, where it has several lookups that were not minimized, a copy that pulls once for all.

    The user's program stays as it is, so that it can still be minimized. Cheap when nothing is new.
    """
    notes = _of(program)
    if notes.num_ops_seen != program.num_ops():
        notes.has_lookups = has_lookups(program)
        notes.joined = _joined(program)
        notes.num_ops_seen = program.num_ops()
    return ToRun(notes.joined or program, notes.has_lookups, notes.is_trained)


def current(program: pir.Program, fetch: Any) -> Any:
    """What to fetch where the user, who named `program`, wrote `fetch`: a value, a name, or lists of them.

    A marker's value becomes the value that took its place; in a copy, a value of the original becomes the copy's.

    Raises:
        PlanError: A value of the training part, in a clone for test.
    """
    if isinstance(fetch, (list, tuple)):
        return [current(program, item) for item in fetch]
    notes = _notes.get(program)
    if notes is None or not isinstance(fetch, pir.Value):
        return fetch
    fetch = _in_place_of(fetch, notes)
    if notes.origin is not None and notes.origin.has(fetch):
        if fetch.get_defining_op().has_attr(rewrite.TRAIN_ONLY):
            raise PlanError("fetch_list: a value is computed by the training part, a clone for test lacks it")
        fetch = _in_place_of(notes.origin.look_up(fetch), notes)
    return fetch if notes.joined is None else current(notes.joined, fetch)


def clone_for_test(program: pir.Program) -> pir.Program:
    """A copy of the forward part, in test mode; values of `program` may be fetched from it."""
    clone = _copy(program)
    rewrite.without_training(clone)
    _of(clone).replaced = list(_of(program).replaced)
    return clone


def _joined(program: pir.Program) -> pir.Program | None:
    if len(plan_evaluation(scan(program)).sites) < 2:
        return None
    copy = _copy(program)
    fuse(copy, plan_evaluation(scan(copy)), for_training=False)
    return copy


def _copy(program: pir.Program) -> pir.Program:
    mapping = pir.IrMapping()
    copy = program.clone(mapping)
    _of(copy).origin = mapping
    return copy


def _in_place_of(value: pir.Value, notes: _Notes) -> pir.Value:
    return next((new for marker, new in notes.replaced if value.is_same(marker)), value)


def _of(program: pir.Program) -> _Notes:
    return _notes.setdefault(program, _Notes())
