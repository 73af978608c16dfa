"""Serves a model while it is trained: deltas, a killed replica, a rollback, and exports that predict as before.

A job trains DeepFM on flights and publishes a version every two seconds. Two shards of read-only pservers, each with
two replicas, follow it, and a Predictor answers requests all the time. `scripts/serve-demo` runs this file; it ends
with 0 only if no request failed, no version went back but by the rollback, and all predictions agree. Its logs and
files are in output/serve-demo.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from fleet_sparse.core.version import Version
from fleet_sparse.local_pservers import LocalPservers, child_environment, local_pservers
from fleet_sparse.models import flights
from fleet_sparse.models.auc import auc
from fleet_sparse.serving.predictor import Predictor

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "dictionary.md"
FOLDER = Path("output/serve-demo")
SERVE = FOLDER / "serve"
NUM_JOB_PSERVERS, NUM_SHARDS, NUM_REPLICAS = 2, 2, 2
NUM_EXAMPLES = 4096
"""Test examples of which the AUC of each version is computed."""
BATCH_SIZE = 32
NUM_LATENCIES = 2000
NUM_VERSIONS_BEFORE_KILL, NUM_VERSIONS_AFTER_KILL = 5, 3
PAUSE_S, REFRESH_S, LIMIT_S, STOP_LIMIT_S = 0.002, 0.25, 120.0, 60.0
TOLERANCE = 1e-6


class DemoFailed(Exception):
    """A process failed, or a result is wrong."""


class Examples(NamedTuple):
    """Flights that no version was trained with."""

    feed: dict[str, NDArray[Any]]
    label: NDArray[np.float32]


class ServedVersion(NamedTuple):
    """What was seen of a version."""

    version: Version
    delay_s: float
    """Seconds from its manifest to the first prediction with it; NaN if a command made it served."""
    auc: float
    way: str
    """How it came to be served."""


class Requests:
    """Requests of a thread, one after the other, for a `with` block. Others may read its attributes.

    Attributes:
        num_answers: Number of answers.
        errors: Errors of requests.
        num_back: Number of times that an answer was of an older version than the one before.
        longest_s: Longest time of a request since it was last set to 0.
    """

    def __init__(self, predictor: Predictor, examples: Examples) -> None:
        self._predictor, self._examples = predictor, examples
        self._latencies: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._first: dict[Version, float] = {}
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_answers, self.num_back, self.longest_s = 0, 0, 0.0
        self.errors: list[Exception] = []

    def __enter__(self) -> Requests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._thread.join()

    def first_answer(self, version: Version) -> float | None:
        """Time of the first answer of a version, as `time.time`; None before it."""
        return self._first.get(version)

    def percentiles(self) -> tuple[float, float]:
        """p50 and p99 of the last requests in ms."""
        latencies = list(self._latencies) or [0.0]
        p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
        return float(p50), float(p99)

    def _run(self) -> None:
        newest, begin = 0, 0
        while not self._is_stopped.wait(PAUSE_S):
            feed = {name: values[begin : begin + BATCH_SIZE] for name, values in self._examples.feed.items()}
            begin = (begin + BATCH_SIZE) % (NUM_EXAMPLES - BATCH_SIZE)
            begun_s = time.perf_counter()
            try:
                version = self._predictor.run(feed).version
            except Exception as error:
                self.errors.append(error)
                continue
            took_s = time.perf_counter() - begun_s
            self._latencies.append(took_s)
            self.longest_s = max(self.longest_s, took_s)
            self._first.setdefault(version, time.time())
            self.num_back += version.number < newest
            newest = version.number
            self.num_answers += 1


class Page:
    """The page of the terminal: versions, and figures of the requests."""

    def __init__(self, console: Console, predictor: Predictor, requests: Requests, examples: Examples) -> None:
        self._predictor, self._requests, self._examples = predictor, requests, examples
        self._lines: list[str] = []
        self._live = Live(self._shown(), console=console, auto_refresh=False)
        self.served: list[ServedVersion] = []

    def __enter__(self) -> Page:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.refresh()
        self._live.__exit__(*error)

    def say(self, line: str) -> None:
        """Adds an event."""
        self._lines.append(line)
        self.refresh()

    def refresh(self) -> None:
        """Draws the page again."""
        self._live.update(self._shown(), refresh=True)

    def watch(self, is_done: Callable[[], bool], what: str, way: str = "") -> None:
        """Shows each version that is served until `is_done`.

        Raises:
            DemoFailed: It takes too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise DemoFailed(f"{what} took longer than {LIMIT_S:g} s: {self._predictor.stats()}")
            self._note(way)
            self.refresh()
            time.sleep(REFRESH_S)
        self._note(way)

    def _note(self, way: str) -> None:
        prediction = self._predictor.run(self._examples.feed)
        version = prediction.version
        if self.served and self.served[-1].version == version:
            return
        (predicted,) = prediction.outputs.values()
        first_s = self._requests.first_answer(version) or time.time()
        delay_s = first_s - manifest_of(version.number).stat().st_mtime
        delay_s = delay_s if "delta" in way else float("nan")  # otherwise a command chose the time
        self.served.append(ServedVersion(version, delay_s, auc(self._examples.label, predicted), way))

    def _shown(self) -> Panel:
        p50, p99 = self._requests.percentiles()
        table = Table("version", "checksum", "delay", "AUC", "", expand=True)
        for each in getattr(self, "served", [])[-8:]:
            delay = "-" if np.isnan(each.delay_s) else f"{each.delay_s:.2f} s"
            checksum = f"{each.version.checksum:016x}"
            table.add_row(str(each.version.number), checksum, delay, f"{each.auc:.4f}", each.way)
        figures = Table.grid(padding=(0, 3))
        figures.add_row(
            f"{self._requests.num_answers:,} answers of {BATCH_SIZE} flights",
            f"{len(self._requests.errors)} failed",
            f"p50 {p50:.1f} ms, p99 {p99:.1f} ms",
        )
        page = Table.grid()
        for part in (table, figures, *self._lines):
            page.add_row(part)
        return Panel(page, title="serving flights while they are trained")


def main() -> None:
    """Runs the demo; exits with 1 if something is wrong."""
    console = Console()
    begun_s = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    quiet = logging.getLogger("fleet_sparse")
    quiet.addHandler(logging.FileHandler(FOLDER / "predictor.log"))
    quiet.propagate = False
    try:
        with ExitStack() as stack:
            run(console, stack)
    except DemoFailed as failure:
        console.print(f"demo failed: {failure}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)
    console.print(f"All predictions agree. Total time {time.monotonic() - begun_s:.0f} s.", highlight=False)


def run(console: Console, stack: ExitStack) -> None:
    """Trains, serves, kills, rolls back and exports."""
    log = stack.enter_context((FOLDER / "pservers.log").open("ab"))
    examples = test_examples()
    root = FOLDER.resolve()
    job = stack.enter_context(local_pservers(NUM_JOB_PSERVERS, root=root, log=log.fileno()))
    trainer = Trainer(stack, job)
    with console.status("training the first version"):
        trainer.await_version(1)
        replicas = [
            stack.enter_context(
                local_pservers(
                    NUM_SHARDS,
                    root=root,
                    load_dirname="serve/rows",
                    arguments=["--read-only"],
                    log=log.fileno(),
                )
            )
            for _ in range(NUM_REPLICAS)
        ]
        # An id without a row reads what it reads in exports.
        predictor = stack.enter_context(Predictor(str(SERVE), pservers_of(replicas), unseen="mean"))
        predictor.run(examples.feed)
    with Requests(predictor, examples) as requests, Page(console, predictor, requests, examples) as page:
        page.watch(lambda: len(page.served) >= NUM_VERSIONS_BEFORE_KILL, "following the job", "delta")
        requests.longest_s = 0.0
        replicas[1].processes[0].kill()
        page.say(
            f"replica 1 of shard 0 was killed with SIGKILL, while version {predictor.stats().version.number} is served"
        )
        num_wanted = len(page.served) + NUM_VERSIONS_AFTER_KILL
        page.watch(lambda: len(page.served) >= num_wanted, "following the job", "delta, one replica less")
        page.say(f"the longest request since then took {requests.longest_s * 1e3:.0f} ms")
        back(page, predictor, requests)
        number = trainer.stop()
        command("unpin", ["version", "unpin", "serve"])
        page.watch(lambda: served(predictor) == number, "following the job again", "unpinned")
        page.say(f"`fleet-sparse version unpin serve`: version {number} is served, the last one")
    if requests.errors:
        raise DemoFailed(f"{len(requests.errors)} requests failed; the first: {requests.errors[0]!r}")
    if requests.num_back > 1:
        raise DemoFailed(f"versions went back {requests.num_back} times, should go back once, by the rollback")
    compare(console, predictor, examples)


def back(page: Page, predictor: Predictor, requests: Requests) -> None:
    """Rolls back, and waits until the older version is served."""
    num_back = requests.num_back
    output = command("rollback", ["version", "rollback", "serve"])
    page.watch(lambda: requests.num_back > num_back or pinned(output) == served(predictor), "rolling back", "rollback")
    page.say(f"`fleet-sparse version rollback serve`: {output.strip()}")


def pinned(output: str) -> int:
    """Number of the snapshot that the rollback names."""
    found = re.search(r"snapshot (\d+)", output)
    return int(found[1]) if found else -1


def served(predictor: Predictor) -> int:
    """Number of the version that is served."""
    return predictor.stats().version.number


def compare(console: Console, predictor: Predictor, examples: Examples) -> None:
    """Exports the version that is served, and predicts in processes that do not know fleet_sparse."""
    prediction = predictor.run(examples.feed)
    (expected,) = prediction.outputs.values()
    np.savez(FOLDER / "feeds.npz", **examples.feed)  # type: ignore[arg-type]
    (reader,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (FOLDER / "dictionary_reader.py").write_text(reader)
    with console.status("exporting, and predicting in other processes"):
        command("plain model", ["export", "serve", "plain"])
        command("dictionary", ["export", "serve", "dictionary", "--format", "dictionary"])
        scripts = {
            "plain model": ["plain.py", "plain/model", "feeds.npz", "plain.npy"],
            "dictionary": ["from_dictionary.py", "serve", "dictionary", "feeds.npz", "dictionary.npy"],
        }
        for name, (script, *arguments) in scripts.items():
            environment = {**os.environ, "PYTHONPATH": str(FOLDER.resolve())}
            process(name, [sys.executable, "-W", "ignore", str(HERE / script), *arguments], environment)
    table = Table("", "AUC", "largest difference", title=f"version {prediction.version.number}")
    table.add_row("Predictor", f"{auc(examples.label, expected):.6f}", "")
    for name, (*_, out) in scripts.items():
        found = np.load(FOLDER / out)
        difference = float(np.abs(found - expected).max())
        table.add_row(name, f"{auc(examples.label, found):.6f}", f"{difference:.1e}")
        if not difference <= TOLERANCE:
            raise DemoFailed(f"{name}: predictions differ by {difference:.1e}, should by {TOLERANCE:.0e} at most")
    console.print(table)


class Trainer:
    """The process of the job.

    Args:
        stack: Ends it.
        pservers: Pservers of the job.
    """

    def __init__(self, stack: ExitStack, pservers: LocalPservers) -> None:
        environment = child_environment(
            **pservers.environment(), FLEET_SPARSE_ROOT=str(FOLDER.resolve()), OMP_NUM_THREADS="1", GLOG_minloglevel="2"
        )
        log = stack.enter_context((FOLDER / "trainer.log").open("ab"))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "trainer.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        stack.callback(self._process.kill)
        self._published = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def await_version(self, number: int) -> None:
        """Waits until it has published a version."""
        with self._changed:
            self._changed.wait_for(lambda: self._published >= number or self._process.poll() is not None, LIMIT_S)
        if self._published < number:
            raise DemoFailed(f"the trainer did not publish version {number}; see {FOLDER / 'trainer.log'}")

    def stop(self) -> int:
        """Lets it save the model once more and end; returns the number of its last version."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait(STOP_LIMIT_S):
            raise DemoFailed(f"the trainer ended with {self._process.returncode}; see {FOLDER / 'trainer.log'}")
        return max(int(path.name.partition("-")[0]) for path in (SERVE / "rows").glob("0*"))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("published "):
                with self._changed:
                    self._published = int(line.split()[1])
                    self._changed.notify_all()
        self._process.wait()
        with self._changed:
            self._changed.notify_all()


def test_examples() -> Examples:
    """Flights of the test set."""
    found = flights.load()
    rows = np.flatnonzero(found.is_test)[:NUM_EXAMPLES]
    return Examples({"ids": found.ids[rows], "dense": found.dense[rows]}, found.label[rows])


def pservers_of(replicas: Sequence[LocalPservers]) -> str:
    """Replicas of a shard with `|` between them, shards with commas."""
    return ",".join("|".join(of_shard) for of_shard in zip(*(each.endpoints for each in replicas), strict=True))


def manifest_of(number: int) -> Path:
    """The manifest of a snapshot."""
    (path,) = (SERVE / "rows").glob(f"{number:06}-*/MANIFEST.json")
    return path


def command(name: str, arguments: Sequence[str]) -> str:
    """Runs a command of fleet-sparse; returns its output."""
    return process(name, [sys.executable, "-W", "ignore", "-m", "fleet_sparse.cli", *arguments], child_environment())


def process(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Runs a process in the folder; returns its output.

    Raises:
        DemoFailed: It failed.
    """
    ended = subprocess.run(
        arguments, cwd=FOLDER, env=dict(environment), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if ended.returncode:
        raise DemoFailed(f"{name}: exit code {ended.returncode}: {ended.stderr.strip()[-500:]}")
    return ended.stdout


if __name__ == "__main__":
    main()
