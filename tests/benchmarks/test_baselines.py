"""Baselines: processes that answer with lines, whatever else they print."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import baselines


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(baselines, "_HERE", tmp_path)
    return tmp_path / "paddle_step.py"


def test_a_baseline_that_ended_is_named_with_its_last_words(script: Path) -> None:
    script.write_text("raise ValueError('no room')")
    with (
        pytest.raises(SystemExit, match=r"(?s)that one.*no room"),
        baselines.baseline_process("that one", Path(sys.executable), script.name) as each,
    ):
        each.told()


def test_no_venv_is_made_with_a_python_that_does_not_fit(tmp_path: Path) -> None:
    venv = baselines.Venv(tmp_path / "venv", ("some==1",), python_version=(3, 3))
    with pytest.raises(SystemExit, match=r"some==1.*--baseline-python"):
        venv.python()
    assert not venv.directory.exists()


def test_a_server_reports_its_seconds_until_it_listens(script: Path) -> None:
    script.write_text("print('noise\\n@@[[7], 1.5]', flush=True); input()")
    with baselines.paddle_server(python=Path(sys.executable)) as (pid, seconds):
        assert (pid, seconds) == (7, 1.5)


def test_a_trainer_is_asked_for_steps_with_the_named_feed(script: Path) -> None:
    script.write_text(
        "import json, sys\nfor line in sys.stdin: print('@@' + json.dumps([int(line), sys.argv[-1]]), flush=True)"
    )
    with baselines.paddle_steps("ctr", servers=2, feed="InMemoryDataset", python=Path(sys.executable)) as run:
        assert [run(3), run(300)] == [[3, "InMemoryDataset"], [300, "InMemoryDataset"]]


def test_a_trainer_gets_the_ports_of_a_proxy(script: Path) -> None:
    script.write_text("import json, sys; input(); print('@@' + json.dumps(sys.argv[5:]), flush=True)")
    with baselines.paddle_steps("ctr", servers=1, ports=[7], reached_at=[8], python=Path(sys.executable)) as run:
        assert run(1) == ["--ports", "7", "--reached-at", "8", "--threads", "1", "--feed", "exe.run"]
