"""What is remembered of each Program that was rewritten, so that it can be run, evaluated and cloned as before.

Notes are kept beside a Program, not on it: `Program.clone` would copy attributes, and they would be wrong there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.plan import Plan, plan_evaluation
from fleet_sparse.transpiler.scan import scan

from . import bodies


@dataclass
class _Notes:
    is_trained: bool = False
    num_ops_seen: int = -1
    """Ops it had when it was last looked at for markers."""
    has_lookups: bool = False
    replaced: list[tuple[pir.Value, pir.Value]] = field(default_factory=list)
    """Values of markers, which a user may still hold, and what took their places."""
    origin: Any = None
    """Of a clone for test: Paddle's mapping from the values of the original."""


_notes: WeakKeyDictionary[pir.Program, _Notes] = WeakKeyDictionary()


def fuse(program: pir.Program, plan: Plan, *, for_training: bool) -> tuple[rewrite.Prefetched, ...]:
    """`rewrite.fuse` with our body, remembered."""
    rewritten = rewrite.fuse(program, plan, bodies.prefetch(plan), for_training=for_training)
    _of(program).replaced += rewritten.replaced
    return rewritten.tables


def note_trained(program: pir.Program) -> None:
    """Remembers that `program` trains."""
    _of(program).is_trained = True


def is_trained(program: pir.Program) -> bool:
    """Whether `note_trained` was called for it."""
    return program in _notes and _notes[program].is_trained


def prepare(program: pir.Program) -> bool:
    """Joins the lookups of a program that was not minimized into one prefetch; cheap when nothing is new.

    Returns:
        Whether the program looks rows up.
    """
    notes = _of(program)
    if notes.num_ops_seen != program.num_ops():
        plan = plan_evaluation(scan(program))
        notes.has_lookups = has_lookups(program)
        if len(plan.sites) > 1:
            fuse(program, plan, for_training=False)
        notes.num_ops_seen = program.num_ops()
    return notes.has_lookups


def has_lookups(program: pir.Program) -> bool:
    """Whether `program` looks rows up, rewritten or not."""
    return bool(scan(program).sites) or rewrite.has_prefetch(program)


def current(program: pir.Program, fetch: Any) -> Any:
    """What to fetch in `program` where the user wrote `fetch`: a value, a name, or lists of them.

    A marker's value becomes the value that took its place; in a clone for test, a value of the original becomes the
    clone's.

    Raises:
        PlanError: A value of the training part, in a clone for test.
    """
    if isinstance(fetch, (list, tuple)):
        return [current(program, item) for item in fetch]
    notes = _notes.get(program)
    if notes is None or not isinstance(fetch, pir.Value):
        return fetch
    for marker, value in notes.replaced:
        if fetch.is_same(marker):
            fetch = value
    if notes.origin is not None and notes.origin.has(fetch):
        if fetch.get_defining_op().has_attr(rewrite.TRAIN_ONLY):
            raise PlanError(
                "fetch_list: a value is computed by the training part, which a clone for test does not have"
            )
        return notes.origin.look_up(fetch)
    return fetch


def clone_for_test(program: pir.Program) -> pir.Program:
    """A copy of the forward part, in test mode; values of `program` may be fetched from it."""
    from paddle.pir import IrMapping

    mapping = IrMapping()
    clone = program.clone(mapping)
    rewrite.without_training(clone)
    notes = _of(clone)
    notes.origin = mapping
    notes.replaced = list(_of(program).replaced)
    return clone


def _of(program: pir.Program) -> _Notes:
    return _notes.setdefault(program, _Notes())
