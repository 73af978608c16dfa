"""Looking ahead: while a batch is computed, the rows of the next one are pulled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.plan import Plan
from fleet_sparse.worker.rows.early_rows import EarlyRows

from .resumable import Resumable, batches_from
from .session import active
from .static import op_callbacks, programs
from .static.prefetch_queue import ExpectedBatch

Feed = Mapping[str, Any]

_Ids = Mapping[int, NDArray[Any]]
"""By number of a site whose ids are fed: the ids, flat, in memory of their own."""


def look_ahead(
    loader: Iterable[Any], program: pir.Program | None = None, *, feed: Callable[[Any], Feed] | None = None
) -> LookAhead:
    """The feeds of `loader`, read one batch early, so that the next batch's rows can be pulled.

    ```python
    feeds = fleet_sparse.look_ahead(loader)
    for epoch in range(2):
        for feed in feeds:
            exe.run(program, feed=feed, fetch_list=[loss])
    ```

    Exact: the losses are those of the plain loop, bit by bit, with one worker, and in sync training with several. A
    step that is run with something else than the batch that was yielded pulls as without it, and so does one whose ids
    cannot be looked up: its run says why. In geo training nothing is pulled ahead; nor are rows whose ids are computed
    in the program.

    Args:
        loader: Of feeds: dicts by name of input, or lists of one such dict, as `paddle.io.DataLoader` gives with
            `feed_list` and `return_list=False`. Any iterable whose batches stay as they are when the next one is
            read; what it raises is raised after the batches that came before. Iterating again reads it again.
        program: That trains, minimized; the default main program when left out.
        feed: Makes the feed of what the loader yields, where that is something else; these feeds are yielded.

    Raises:
        PlanError: The program does not train, or no ids of its lookups are fed as they are. While batches are read: a
            batch is no feed, or its ids changed when the next one was read.
        FleetSparseError: A batch is read before `fleet.init_worker()`.
    """
    program = paddle.static.default_main_program() if program is None else program
    plan = programs.plan_of(program)
    if plan is None or not any(all(plan.sites[site].fed_by for site in table.sites) for table in plan.tables):
        raise PlanError(
            "look_ahead: the program has no table that trains on ids as they are fed. Call minimize first; where all "
            "ids are computed in the program, do without look_ahead"
        )
    return LookAhead(loader, plan, feed)


class LookAhead:
    """What `look_ahead` returns: an iterable, as long as the loader."""

    def __init__(self, loader: Iterable[Any], plan: Plan, feed: Callable[[Any], Feed] | None) -> None:
        self._loader = loader
        self._plan = plan
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._loader, Resumable):
            return self._loader.read_by(self._read)
        return self._read(iter(self._loader))

    def skip(self, num_batches: int) -> Iterator[Any]:
        """The feeds without the first so many."""
        return self._read(batches_from(self._loader, num_batches))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _ahead(batches if self._feed is None else map(self._feed, batches), self._plan)

    def __len__(self) -> int:
        """Raises `TypeError` if the loader has no length."""
        return len(self._loader)  # type: ignore[arg-type]  # of one without a length it raises what it should


def _ahead(batches: Iterator[Any], plan: Plan) -> Iterator[Any]:
    waiting: deque[tuple[Any, _Ids]] = deque()
    while True:
        try:
            batch = next(batches)
            ids = _ids_of(plan, _feed_of(batch))
        except Exception as error:  # StopIteration too; the plain loop comes to it after the batch that waits
            end = error
            break
        for before, ids_then in waiting:
            _check_unchanged(ids_then, _ids_of(plan, _feed_of(before)))
        _expect(plan, ids)
        waiting.append((batch, ids))
        if len(waiting) == 2:
            yield waiting.popleft()[0]
    yield from (batch for batch, _ in waiting)
    if not isinstance(end, StopIteration):
        raise end


def _feed_of(batch: Any) -> Feed:
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        (batch,) = batch
    if not isinstance(batch, Mapping):
        raise PlanError(
            f"look_ahead: the loader yields a {type(batch).__name__}, should be a dict by name of input. "
            "Write look_ahead(loader, feed=lambda batch: {...}), which then yields these dicts"
        )
    return batch


def _ids_of(plan: Plan, feed: Feed) -> _Ids:
    sites = enumerate(plan.sites)
    return {number: np.array(feed[site.fed_by]).reshape(-1) for number, site in sites if site.fed_by in feed}


def _check_unchanged(then: _Ids, now: _Ids) -> None:
    if then.keys() != now.keys() or not all(np.array_equal(then[site], now[site]) for site in then):
        raise PlanError(
            "look_ahead: the ids of a batch changed when the loader made the next one; should stay as they are until "
            "the batch was run. Yield a new dict with new arrays for each batch"
        )


def _expect(plan: Plan, ids: _Ids) -> None:
    session = active()
    tables, wanted = {}, {}
    for number, table in enumerate(plan.tables):
        if all(site in ids for site in table.sites):
            try:
                unique, positions = op_callbacks.unique_of_table(session, plan, table, ids)
            except ValueError:
                return  # ids that cannot be looked up: the run of this batch says why
            tables[number] = (unique, positions)
            wanted[table.spec.table] = (session.spec_of(table.spec), unique)
    if tables:
        known = {site: ids[site] for number in tables for site in plan.tables[number].sites}
        session.expectations.expect(plan, ExpectedBatch(known, tables, EarlyRows(wanted)))
