"""Looking ahead: while a batch is computed, the rows of the next one are pulled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.plan import Plan
from fleet_sparse.worker.look_ahead import RowsAhead

from . import bodies, programs
from .expectations import ExpectedBatch
from .session import Session, active

Feed = Mapping[str, Any]


def look_ahead(
    loader: Iterable[Any], program: pir.Program | None = None, *, feed: Callable[[Any], Feed] | None = None
) -> Iterator[Any]:
    """Yields what `loader` yields, one batch later than it is read, so that the next batch's rows can be pulled.

    ```python
    for batch in fleet_sparse.look_ahead(loader):
        exe.run(program, feed=batch, fetch_list=[loss])
    ```

    Exact: the losses are those of the plain loop, bit by bit, with one worker, and in sync training with several. A
    step that is run with something else than the batch that was yielded pulls as without it. In geo training nothing
    is pulled ahead; nor are rows whose ids are computed in the program.

    Args:
        loader: Of feeds: dicts by name of input, or lists of one such dict, as `paddle.io.DataLoader` gives with
            `feed_list`. Any iterable.
        program: That trains, minimized; the default main program when left out.
        feed: Makes the feed of what the loader yields, where that is something else.

    Raises:
        PlanError: The program does not train, or no ids of its lookups are fed as they are; and, at the first batch
            that is no feed, what it should be.
    """
    program = paddle.static.default_main_program() if program is None else program
    plan = programs.plan_of(program)
    if plan is None or not any(site.fed_by for site in plan.sites):
        raise PlanError(
            "look_ahead: the program has no flagged lookup that trains on ids as they are fed. Call minimize first; "
            "where all ids are computed in the program, do without look_ahead"
        )
    return _ahead(iter(loader), plan, feed or _feed_of)


def _ahead(batches: Iterator[Any], plan: Plan, feed: Callable[[Any], Feed]) -> Iterator[Any]:
    waiting: deque[Any] = deque()
    for batch in batches:
        session = active()
        session.expectations.expect(plan, _expected(session, plan, feed(batch)))
        waiting.append(batch)
        if len(waiting) == 2:
            yield waiting.popleft()
    yield from waiting


def _feed_of(batch: Any) -> Feed:
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        (batch,) = batch
    if not isinstance(batch, Mapping):
        raise PlanError(
            f"look_ahead: the loader yields a {type(batch).__name__}, should be a dict by name of input. "
            "Write look_ahead(loader, feed=lambda batch: {...})"
        )
    return batch


def _expected(session: Session, plan: Plan, feed: Feed) -> ExpectedBatch:
    inputs = {number: np.asarray(feed[site.fed_by]) for number, site in enumerate(plan.sites) if site.fed_by in feed}
    tables, wanted = {}, {}
    for number, table in enumerate(plan.tables):
        if all(site in inputs for site in table.sites):
            unique, positions = bodies.unique_of_table(session, plan, table, inputs)
            tables[number] = (unique, positions)
            wanted[table.spec.table] = (session.spec_of(table.spec), unique)
    known = {site for number in tables for site in plan.tables[number].sites}
    ids = {site: inputs[site].reshape(-1) for site in known}
    return ExpectedBatch(ids, tables, RowsAhead(wanted))
