"""Goals: which runs count, the figures of made runs, and that none is ever dropped."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.goals import GOALS, Goal, Verdict, verdicts
from benchmarks.page import DOCS, state
from benchmarks.programs import FLOOR, OURS
from benchmarks.record import ROOT
from support.history import versions

SYNC = {"mode": "sync", "channel": "stream", "pservers": 2, "serial": False}


def step_run(ratios: Sequence[float], commit: str = "new", **options: Any) -> dict[str, Any]:
    """Returns a record of the step benchmark with these ratios to the floor, one a round."""
    rounds = [{OURS: {"seconds": [ratio]}, FLOOR: {"seconds": [1.0]}} for ratio in ratios]
    for each in rounds:
        for of_program in each.values():
            of_program.update(worker_cpu_s=1.0, pservers_cpu_s=1.0)
    date = f"{commit}{ratios}"
    return {"date": date, "commit": commit, "is_dirty": False, "options": {**SYNC, **options}, "rounds": rounds}


def sync_goals(results: Path, *runs: dict[str, Any]) -> list[Verdict]:
    """Returns the verdicts of the sync step over its floor, on made records."""
    (results / "step.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    return [each for each in verdicts(results) if each.goal.name == "click model, step over its floor: sync, stream"]


def test_a_figure_is_the_median_over_all_runs_of_a_commit(tmp_path: Path) -> None:
    first, _ = sync_goals(tmp_path, step_run([1.2, 1.3, 1.4]), step_run([1.0, 1.05]))
    assert first.figure
    assert first.run
    assert (first.figure.value, len(first.run["runs"]), len(first.run["rounds"])) == (1.2, 2, 5)
    assert (first.bound, first.is_reached, first.is_within_noise) == (1.12, False, True)


def test_the_newest_commit_with_the_options_counts(tmp_path: Path) -> None:
    runs = step_run([1.5], "old"), step_run([1.1]), step_run([9.0], mode="async"), step_run([9.0], serial=True)
    first, second = sync_goals(tmp_path, *runs)
    assert first.figure
    assert (first.figure.value, first.is_reached, second.is_reached, second.bound) == (1.1, True, True, 1.1)


def test_a_missed_and_an_unmeasured_goal_stay(tmp_path: Path) -> None:
    assert [each.is_reached for each in sync_goals(tmp_path, step_run([2.0]))] == [False, False]
    assert len(verdicts(tmp_path)) == sum(len(goal.bounds) for goal in GOALS)
    assert {each.figure for each in verdicts(tmp_path / "nowhere")} == {None}


def test_no_bound_ever_leaves_the_page() -> None:
    bound = re.compile(r"^\| [^|]+ \| at (most|least) ([\d.]+)[^|]* \|", re.M)  # names and units may change
    now = Counter(bound.findall((DOCS / "benchmarks.md").read_text("utf-8")))
    for text in versions(ROOT, "docs/benchmarks.md"):
        assert Counter(bound.findall(text)) <= now


def test_a_bound_between_the_quartiles_is_within_noise() -> None:
    goal = Goal("", (1.0,), "", "step", {}, lambda run: None)
    assert not Verdict(goal, 1.0, None, None).is_within_noise


def test_a_goal_whose_condition_does_not_hold_does_not_apply(tmp_path: Path) -> None:
    losses = {"lag 100, no share": 0.002, "drift 2 x rate": 0.5}
    jobs = {bound: {"loss_of_auc": loss, "rows_saved": 0.5} for bound, loss in losses.items()}
    options = {"model": "dcn", "optimizer": "adam", "workers": 8, "examples": 3_000_000}
    run = {"date": "", "commit": "new", "is_dirty": False, "options": options, "rounds": [jobs]}
    (tmp_path / "het_auc.jsonl").write_text(json.dumps(run) + "\n")
    (found,) = [each for each in verdicts(tmp_path) if each.why_not]
    assert found.goal.name.startswith("dcn, adam, 8 workers, AUC with a drift")
    assert (found.figure, found.is_reached, state(found)) == (None, False, "inapplicable")
