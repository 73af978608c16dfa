"""A checkout of PaddleRec: its static models, and copies of its tools with one line more."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from fleet_sparse.local_pservers import local_pservers

from .jobs import SCRIPTS, environment

ROOT = Path(os.environ.get("PADDLEREC", "")).resolve()
"""The checkout, if `PADDLEREC` is set."""
PAGE = Path(__file__).parent.parent.parent / "docs" / "paddlerec.md"
ONE_LINE = "import fleet_sparse; fleet_sparse.install()"
TIMEOUT_S = 900
TOLERANCE = 1e-5
EQUAL, REFUSED, FAILED = "equal", "refused", "fails"
FEWER_FIELDS = {"rank/deepfefm": "9,4"}
"""Numbers of sparse and dense fields of models that Paddle compiles for too long with all of them."""


class Outcome(NamedTuple):
    """A line of the page's table."""

    model: str
    num_tables: str
    """Number of tables of its program."""
    embedded: str
    """`equal` to plain Paddle, `refused`, or `fails` if plain Paddle fails as well."""
    two_by_two: str
    """The same on two pservers with two workers."""


def outcomes_on_page() -> list[Outcome]:
    """The lines of the page's table of models."""
    lines = re.findall(r"^\| ([a-z]+/\S+) \| (\S+) \| (\w+)[^|]*\| (\w+)", PAGE.read_text("utf-8"), re.MULTILINE)
    return [Outcome(*line) for line in lines]


def outcome_of(model: str, directory: Path, **variables: str) -> Outcome:
    """Trains a model in plain Paddle, embedded, and on two pservers with two workers."""
    plain = _report(_started(model, PLAIN="1", **variables))
    embedded = _report(_started(model, **variables))
    with local_pservers(2, root=directory) as pservers:
        workers = [_started(model, **pservers.environment(index, 2), **variables) for index in range(2)]
        reports = [_report(worker) for worker in workers]
    found = [_verdict(plain, report) for report in (embedded, *reports)]
    print(model, {"plain": plain, "embedded": embedded, "2x2": reports})
    num_tables = str(embedded.get("num_tables", "-"))
    return Outcome(model, num_tables, found[0], found[1] if found[1] == found[2] else "differs")


def with_one_line(directory: Path, tool: str) -> Path:
    """Copies PaddleRec's tools, with one line more in one of them; returns its path."""
    tools = directory / "tools"
    shutil.copytree(ROOT / "tools", tools)
    lines = (tools / tool).read_text("utf-8").split("\n")
    place = next(number for number, line in enumerate(lines) if line.startswith("from __future__"))
    (tools / tool).write_text("\n".join([*lines[: place + 1], ONE_LINE, *lines[place + 1 :]]), "utf-8")
    return tools / tool


def _started(model: str, **variables: str) -> subprocess.Popen[str]:
    directory = ROOT / "models" / model
    config = next(path for path in map(directory.joinpath, ("config.yaml", "config_bigdata.yaml")) if path.exists())
    fields = FEWER_FIELDS.get(model, "")
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "paddlerec_model.py")],
        env=environment(CONFIG=str(config), TOOLS=str(ROOT), FIELDS=fields, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _report(process: subprocess.Popen[str]) -> dict[str, Any]:
    with process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"failed": f"no answer in {TIMEOUT_S} s"}
    found = re.findall(r"^RESULT (.*)$", output, re.MULTILINE)
    return json.loads(found[0]) if found else {"failed": output[-2000:]}


def _verdict(plain: dict[str, Any], report: dict[str, Any]) -> str:
    if "refused" in report:
        return REFUSED
    if "failed" in report:
        return FAILED if "failed" in plain else "fails alone"
    if "failed" in plain:
        return "works"
    pairs = [
        (one, other)
        for steps in zip(plain["steps"], report["steps"], strict=True)
        for one, other in zip(*steps, strict=True)
    ]
    assert pairs, "nothing was fetched"
    return EQUAL if all(abs(one - other) <= TOLERANCE * max(1, abs(one)) for one, other in pairs) else "differs"
