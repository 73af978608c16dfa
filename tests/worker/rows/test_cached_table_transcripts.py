"""What a worker's cache asks and sends, by transcripts: `golden/row_cache/*.txt`.

A transcript has pairs of a command and what it prints. The rows have two values: the first counts the updates of the
worker with the cache, the second those of the others. `GOLDEN=write scripts/test tests/worker` rewrites what differs.

- `job workers 2 lag 10 capacity 4 ...`: begins; also `share`, `drift`, `max_held`, `policy`, `admit`, `steps counted`.
- `read 1 2`: begins the next step and reads rows. `-`: version none.
- `update`: ends the step, with a gradient that adds 1. `update lost`: its push is not accepted.
- `others 3 4`: the other workers make 4 updates of row 3. `pserver 3`: row and clock.
- `flush`, `forget`, `forget versions`, `evaluate 1 2`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import ADMISSIONS, POLICIES
from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, RowBound
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.cache_step import Outgoing
from support.cached_jobs import CachedJob, Step

GOLDEN = Path(__file__).parents[1] / "golden" / "row_cache"
TRANSCRIPTS = sorted(GOLDEN.glob("*.txt"))
NUM_IDS, DIM = 100, 2


def listed(row: NDArray[np.float32]) -> str:
    return f"[{' '.join(f'{value:g}' for value in row)}]"


class Transcript:
    """A job of which one worker has a cache."""

    def __init__(self) -> None:
        self.step = 0
        self.begun: Step | None = None

    def run(self, line: str) -> str:
        command, *arguments = line.split()
        printed = list(getattr(self, command)(*arguments))
        return "\n".join(printed) if printed else "nothing"

    def job(self, *options: str) -> Iterator[str]:
        of = dict(zip(options[::2], options[1::2], strict=True))
        lag, share, drift = of.get("lag"), of.get("share"), of.get("drift")
        bound = RowBound(lag and int(lag), share and float(share), drift and float(drift))  # type: ignore[arg-type]
        job = CacheJob(
            bound,
            int(of.get("workers", "2")),
            0 if of.get("steps") == "counted" else None,
            POLICIES[of.get("policy", "lru")],
            ADMISSIONS[of.get("admit", "all")],
            int(of["max_held"]) if "max_held" in of else None,
        )
        self.cached = CachedJob(job, int(of.get("capacity", "4")), DIM, NUM_IDS)
        self.table = self.cached.tables[0]
        yield from ()

    def read(self, *ids: str) -> Iterator[str]:
        self.step += 1
        array = np.array(ids, np.int64)
        plan = self.table.plan(array, self.step)
        answer = self.cached.answered(plan)
        rows = np.full((len(ids), DIM), np.nan, np.float32)
        rows[plan.plain] = self.cached.rows[array[plan.plain]]
        for id_, version, slack in zip(array[plan.asked], plan.versions, answer.slack, strict=True):
            said = "row follows" if slack >= ROW_FOLLOWS else f"leased for {slack}"
            yield f"ask {id_} {'-' if version == NO_VERSION else version}: {said}"
        if len(plan.plain):
            yield f"pull {' '.join(map(str, array[plan.plain]))}"
        self.begun = Step(plan, self.table.take(plan, answer, rows), rows)
        yield f"rows {' '.join(map(listed, rows))}"

    def update(self, how: str = "") -> Iterator[str]:
        assert self.begun is not None
        plan = self.begun.plan
        grads = np.tile(np.array([-1, 0], np.float32), (len(plan.ids), 1))
        outgoing = self.table.apply(plan, self.begun.arrived, grads, 1.0, 1)
        if len(outgoing.as_gradients):
            yield f"gradients {' '.join(map(str, plan.ids[outgoing.as_gradients]))}"
        yield from self.changes(outgoing)
        if how != "lost":
            self.cached.receive(plan.ids, grads, outgoing)
            self.table.sent(outgoing)

    def changes(self, outgoing: Outgoing) -> Iterator[str]:
        for changes in outgoing.changes:
            for id_, row, amount, slot in zip(changes.ids, changes.rows, changes.amounts, changes.slots, strict=True):
                yield f"change {id_} {listed(row)} of {amount}{' left' if slot < 0 else ''}"

    def others(self, id_: str, count: str) -> Iterator[str]:
        self.cached.rows[int(id_), 1] += int(count)
        self.cached.clocks[int(id_)] += np.uint32(int(count))
        yield from self.pserver(id_)

    def pserver(self, id_: str) -> Iterator[str]:
        yield f"{listed(self.cached.rows[int(id_)])} clock {self.cached.clocks[int(id_)]}"

    def flush(self) -> Iterator[str]:
        outgoing = self.table.flush()
        yield from self.changes(outgoing)
        self.cached.receive(np.empty(0, np.int64), np.empty((0, DIM), np.float32), outgoing)
        self.table.sent(outgoing)

    def forget(self, what: str = "") -> Iterator[str]:
        if what == "versions":
            self.table.forget_versions()
        else:
            self.table.forget()
        yield from ()

    def evaluate(self, *ids: str) -> Iterator[str]:
        array = np.array(ids, np.int64)
        rows = self.cached.rows[array]
        self.table.add_held(array, rows)
        yield f"rows {' '.join(map(listed, rows))}"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_cache_does_what_its_transcript_says(path: Path) -> None:
    transcript, written, found = Transcript(), path.read_text(), []
    for paragraph in written.rstrip("\n").split("\n\n"):
        lines = paragraph.split("\n")
        comments = [line for line in lines if line.startswith("#")]
        command = next((line for line in lines if not line.startswith("#")), None)
        found.append("\n".join(comments if command is None else [*comments, command, "----", transcript.run(command)]))
    text = "\n\n".join(found) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == written
