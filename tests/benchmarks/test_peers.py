from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import peers


def test_a_peer_that_ended_is_named_with_what_it_wrote_last(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('no room')")
    monkeypatch.setattr(peers, "_HERE", tmp_path)
    message = r"(?s)that one ended before it was asked to:.*ValueError: no room"
    with pytest.raises(SystemExit, match=message), peers.peer("that one", Path(sys.executable), "script.py") as peer:
        peer.told()


def test_a_peer_that_fails_to_save_and_load_says_why(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "paddle_ps.py").write_text("raise ValueError('no room')")
    monkeypatch.setattr(peers, "_HERE", tmp_path)
    with pytest.raises(SystemExit, match=r"(?s)paddle_ps[.]py ended with exit code 1:.*ValueError: no room"):
        peers.measure_paddle(rows=1, dim=1, servers=1, shards=1, python=Path(sys.executable))


def test_no_venv_is_made_with_a_python_that_the_peer_does_not_run_with(tmp_path: Path) -> None:
    venv = peers.Venv(tmp_path / "venv", ("some==1",), python_version=(3, 3))
    with pytest.raises(SystemExit, match=r"some==1: Python is 3[.]\d+, should be 3[.]3\. .*--peer-python"):
        venv.python()
    assert not venv.directory.exists()


def test_a_server_says_how_long_it_took_to_listen(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "paddle_step.py").write_text("print('@@[[7], 1.5]', flush=True); input()")
    monkeypatch.setattr(peers, "_HERE", tmp_path)
    with peers.paddle_server(python=Path(sys.executable)) as (pid, seconds):
        assert (pid, seconds) == (7, 1.5)


def test_steps_are_asked_of_a_trainer_with_the_feed_that_was_named(tmp_path: Path, monkeypatch) -> None:
    script = "import json, sys\nfor line in sys.stdin: print('@@' + json.dumps([int(line), *sys.argv[1:]]), flush=True)"
    (tmp_path / "paddle_step.py").write_text(script)
    monkeypatch.setattr(peers, "_HERE", tmp_path)
    options = ["--model", "ctr", "--servers", "2", "--feed", "InMemoryDataset"]
    with peers.paddle_steps("ctr", servers=2, feed="InMemoryDataset", python=Path(sys.executable)) as run:
        assert [run(3), run(300)] == [[3, *options], [300, *options]]
