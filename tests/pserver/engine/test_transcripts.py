"""Steps of workers on one shard, as transcripts: each command of a file, and what the shard answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleet_sparse.core.mode import ASYNC, SUM, SYNC, Mode
from fleet_sparse.core.row_bound import NO_VERSION, RowBound
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frame_format import Action, Block, Frame, Op
from support.shards import ADAM, DENSE, SGD, FrameClient, assign, ids_of, late_replies, make_shard, pull, push
from support.steps import Worker, join, rows_now
from support.straight import ReadableAnswers, StraightAnswers

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
MODES = {"avg": Mode(SYNC), "sum": Mode(SYNC, scale=SUM), "async": Mode(ASYNC)} | {
    f"lag{lag}": Mode(ASYNC, max_step_lag=lag) for lag in range(4)
}
TABLES = {"sgd": SGD, "adam": ADAM, "dense": DENSE}
OPS = {op.name.lower().replace("_", "-"): op for op in Op}
NAMES = re.compile(r"worker \d+|(?:table|dense) '\w+'|step \d+")
OTHER = b"another process."
MAX_BYTES = 1 << 20
MakePath = Callable[[Shard, int], ReadableAnswers]


class Transcript:
    """Runs commands on one shard; each of its replies is a line, that of the command first, then the deferred ones.

    job MODE WORKERS                     a new shard, and the workers of its job; MODE is avg, sum, async or lagN, or
                                         one of them and `:20` if workers cache rows with a lag of 20
    OP WORKER [ARGUMENT ...]             a request; arguments are blocks and header fields:
        7=1,8=1                          push gradients 1 to all floats of the rows of ids 7 and 8; `none=` no rows
        dense=1                          push gradients 1 to all values of the dense array; in ASSIGN values
        x0.5                             factor of `sgd`; `adam*0.5` of another table
        7,8 | dense                      pull these rows | the dense values
        7?5,8?                           ask about a copy of row 7 of version 5, and for the row of 8 and its version
        7~1*3,8~2*1                      change row 7 by 1 in 3 updates, and row 8 by 2 in one
        7@4,8@5                          assign 4 and 5 to all floats of rows 7 and 8
        weight:2 rate:0.5 step:3 part:0/2 ...  fields of the push, and of the header
    again WORKER REQUEST                 the same frame again
    join WORKER MODE                     another process registers as this worker; it is called WORKER'
    evict WORKER                         the worker is lost
    rows IDS | dense | steps             what the shard has now: rows, dense values, optimizer steps of the tables

    A reply is `WORKER.REQUEST OP seq PUSHES step COMPLETE`, the newest applied push and complete step, then what it
    carries; that of a refusal has its code, and the names and numbers in its message.
    """

    def __init__(self, make_path: MakePath) -> None:
        self._make_path = make_path
        self.shard: Shard = make_shard()
        self._path = make_path(self.shard, MAX_BYTES)
        self.workers: dict[str, Worker[Shard]] = {}
        self.sent: dict[tuple[str, int], Frame] = {}

    def close(self) -> None:
        self.shard.close()

    def run(self, line: str) -> str:
        command, *arguments = line.split()
        replies: list[Frame] = []
        if command == "job":
            self._begin(*arguments)
        elif command == "join":
            self._join(*arguments)
        elif command == "evict":
            self.shard.evict_worker(int(arguments[0]), "a reason")
        elif command == "rows":
            ids = [int(id_) for id_ in arguments[0].split(",")]
            return " ".join(f"{id_}={row[0]:g}" for id_, row in zip(ids, rows_now(self.shard, SGD, *ids), strict=True))
        elif command == "dense":
            return " ".join(f"{value:g}" for value in FrameClient(self.shard, OTHER).values(DENSE))
        elif command == "steps":
            return " ".join(f"{state.name}={state.optimizer_step}" for state in self.shard.states())
        elif command == "again":
            replies.append(self._path.answer_frame(self.sent[arguments[0], int(arguments[1])]))
        else:
            frame = self._frame(OPS[command], *arguments)
            self.sent[arguments[0], frame.header.request_id] = frame
            replies.append(self._path.answer_frame(frame))
        return "\n".join(self._said(reply) for reply in [*replies, *late_replies(self.shard)])

    def _begin(self, mode: str, num_workers: str) -> None:
        self.close()
        self.shard, self.workers, self.sent = make_shard(SGD, ADAM, DENSE), {}, {}
        self._path = self._make_path(self.shard, MAX_BYTES)
        for index in range(int(num_workers)):
            self.workers[str(index)] = Worker(self.shard, index)
            join(self.workers[str(index)], int(num_workers), _mode(mode), begins_job=index == 0)

    def _join(self, worker: str, mode: str) -> None:
        num_workers, name = len({name.rstrip("'") for name in self.workers}), worker
        while name in self.workers:
            name += "'"
        client_id = bytes([len(self.workers) + 1]) * 16
        self.workers[name] = Worker(self.shard, int(worker), client_id=client_id)
        join(self.workers[name], num_workers, _mode(mode))

    def _frame(self, op: Op, name: str, *arguments: str) -> Frame:
        worker, blocks, header = self.workers[name], [], {}
        fields = dict(argument.split(":") for argument in arguments if ":" in argument)
        if "part" in fields:
            header["part"], header["num_parts"] = map(int, fields.pop("part").split("/"))
        weight, rate = float(fields.pop("weight", 1)), float(fields.pop("rate", 1))
        for argument in arguments:
            if ":" not in argument:
                blocks.append(_block(op, argument, weight, rate))
        header |= {field: int(value) for field, value in fields.items()}
        frame = worker.frame(op, *blocks, **header)
        if op is Op.COMMIT and frame.header.part + 1 == frame.header.num_parts:
            worker.step = max(worker.step, frame.header.step)
        return frame

    def _said(self, reply: Frame) -> str:
        header = reply.header
        (name,) = (name for name, worker in self.workers.items() if worker.client_id == header.client_id)
        said = f"{name}.{header.request_id} {header.op.name}"
        if reply.error is not None:
            names = dict.fromkeys(NAMES.findall(reply.error.message))
            number = f" {reply.error.number}" if reply.error.number else ""
            return " ".join([said, reply.error.code.name + number, *(f"({each})" for each in names)])
        return " ".join([said, f"seq {header.push_seq} step {header.step}", *map(_contents, reply.blocks)])


def _mode(text: str) -> Mode:
    name, _, lag = text.partition(":")
    return MODES[name] if not lag else msgspec.structs.replace(MODES[name], row_bound=RowBound(lag=int(lag)))


def _block_of_copies(argument: str, rate: float) -> Block:
    (mark,) = {each for each in argument if each in "?~@"}
    pairs = dict(each.split(mark) for each in argument.split(","))
    ids, said = ids_of(*map(int, pairs)), [*pairs.values()]
    if mark == "?":
        versions = np.array([int(version or NO_VERSION) for version in said], np.uint32)
        return pull(SGD, ids, copies={"versions": versions})
    values = [float(each.split("*")[0]) for each in said]
    block = push(SGD, ids, np.repeat(np.array(values, np.float32).reshape(-1, 1), 2, axis=1), learning_rate=rate)
    block.action = Action.ASSIGN
    if mark == "~":
        counts = np.array([int(each.split("*")[1]) for each in said], np.uint32)
        block.action, block.statistics = Action.CHANGE, {"counts": counts}
    return block


def _block(op: Op, argument: str, weight: float, rate: float) -> Block:
    if set(argument) & set("?~@"):
        return _block_of_copies(argument, rate)
    if argument[0] == "x":
        argument = f"sgd*{argument[1:]}"
    if "*" in argument:
        name, _, values = argument.partition("*")
        factors = np.array([float(value) for value in values.split(",") if value], np.float32).reshape(-1, 1)
        spec = TABLES[name]
        return Block(Action.FACTORS, spec.table_id, spec.schema_hash, 1, len(factors), None, factors)
    if "=" not in argument:
        return pull(DENSE, count=8) if argument == "dense" else pull(SGD, ids_of(*map(int, argument.split(","))))
    fields = {"gradient_scale": weight, "learning_rate": rate}
    name, _, value = argument.partition("=")
    if name == "dense":
        values = np.full(8, float(value), np.float32)
        return assign(DENSE, values) if op is Op.ASSIGN else push(DENSE, None, values, **fields)
    spec = ADAM if name == "adam" else SGD
    if spec is ADAM:
        return push(ADAM, ids_of(1), np.full((1, 3), float(value), np.float32), **fields)
    grads = dict(pair.split("=") for pair in argument.split(",")) if value else {}
    ids = ids_of(*map(int, grads))
    rows = np.repeat(np.array([float(grad) for grad in grads.values()], np.float32).reshape(-1, 1), 2, axis=1)
    return push(SGD, ids, rows, **fields)


def _contents(block: Block) -> str:
    if block.rows is None:
        return f"[slack {' '.join(map(str, block.copies['slack']))}]"
    name = next(name for name, spec in TABLES.items() if spec.table_id == block.table_id)
    if block.action is Action.NORMS:
        return f"[{name} {' '.join(f'{value:g}' for value in block.rows.view(np.float64).reshape(-1))}]"
    values = " ".join(f"{value:g}" for value in block.rows[:, 0])
    if block.copies:
        return f"[{values} of {' '.join(map(str, block.copies['versions']))}]"
    if block.ids is not None:
        return f"[changed {' '.join(map(str, block.ids.tolist()))}: {values}]"
    return f"[{values}]"


def cases_of(path: Path) -> Iterator[tuple[str, str]]:
    """Pairs of a command and the lines that are expected of it: behind `->`, and on indented lines below."""
    cases: list[list[str]] = []
    for line in path.read_text().splitlines():
        if line.startswith(" "):
            cases[-1].append(line.strip())
        elif line and not line.startswith("#"):
            cases.append([part.strip() for part in line.split("->")])
    for command, *expected in cases:
        yield command, "\n".join(expected)


@pytest.mark.parametrize("make_path", [ReadableAnswers, StraightAnswers], ids=["readable", "straight"])
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
@pytest.mark.guarantee("S2", "S9", "A5")
def test_shard_does_what_its_transcript_says(path: Path, make_path: MakePath) -> None:
    transcript = Transcript(make_path)
    try:
        for command, expected in cases_of(path):
            assert (command, transcript.run(command)) == (command, expected)
    finally:
        transcript.close()
