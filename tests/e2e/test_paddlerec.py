"""PaddleRec's own models and trainers, if `PADDLEREC` is its checkout: what docs/paddlerec.md says of them."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.jobs import Job, fleetrun
from support.paddlerec import ONE_LINE, ROOT, Outcome, outcome_of, outcomes_on_page, with_one_line

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("PADDLEREC"), reason="PADDLEREC is not set to a checkout of PaddleRec"),
    pytest.mark.skipif(find_spec("six") is None, reason="PaddleRec imports six, which is not installed"),
]

SUCCESS = "Run Success, Exit."
DAY, NEXT_DAY, PASSES = "20190720", "20190721", ("0000", "0600", "1200", "1800")
TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def patience() -> None:
    """Waits for a model that takes minutes to build are no hangs."""
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("line", outcomes_on_page(), ids=lambda line: line.model)
def test_model_is_as_the_page_says(line: Outcome, tmp_path: Path) -> None:
    assert outcome_of(line.model, tmp_path) == line


@pytest.mark.parametrize(("model", "num_tables"), [("recall/word2vec", "3"), ("recall/mind", "0")])
def test_model_is_equal_with_its_optimizer_given_to_fleet(model: str, num_tables: str, tmp_path: Path) -> None:
    assert outcome_of(model, tmp_path, GIVEN="1") == Outcome(model, num_tables, "equal", "equal")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a tool of PaddleRec with one line more, on two pservers with two workers, beside a copy of a model."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("python", "python3", "python3.7"):  # in the yaml files
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")

    def run(tool: str, *arguments: str, directory: Path = tmp_path, strategy: str = "") -> Job:
        shutil.rmtree(tmp_path / "tools", ignore_errors=True)
        path = with_one_line(tmp_path, tool)
        assert path.read_text().count(ONE_LINE) == 1
        if strategy:
            module = path.parent / "utils" / "static_ps" / "program_helper.py"
            text = module.read_text("utf-8").replace("paddle.distributed.fleet.DistributedStrategy()", strategy)
            module.write_text(text.replace("\nimport paddle\n", "\nimport fleet_sparse\nimport paddle\n"), "utf-8")
        ended = fleetrun(path, directory, *arguments, num_servers=2, num_workers=2, timeout_s=TIMEOUT_S)
        for worker in range(2):
            log = ended.logs[f"workerlog.{worker}"]
            assert SUCCESS in log, log[-4000:]
        return ended

    return run


@pytest.mark.parametrize("model", ["dnn", "wide_deep"])
def test_static_ps_trainer_trains(job, tmp_path, model):
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "model").mkdir()
    options = ["runner.epochs=6", "runner.model_save_path=model"]
    ended = job("static_ps_trainer.py", "-m", f"models/rank/{model}/config_cpups.yaml", "-o", *options)
    aucs = [re.findall(r"auc: ([\d.]+)$", ended.logs[f"workerlog.{worker}"], re.MULTILINE) for worker in range(2)]
    assert aucs[0] == aucs[1]
    assert float(aucs[0][-1]) > float(aucs[0][0])
    assert (tmp_path / "model" / "5").is_dir()


def test_static_ps_trainer_caches_rows(job, tmp_path):
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "model").mkdir()
    options = ["runner.epochs=6", "runner.model_save_path=model"]
    strategy = "fleet_sparse.PserverStrategy(max_row_lag=100, row_cache=fleet_sparse.RowCache())"
    ended = job("static_ps_trainer.py", "-m", "models/rank/dnn/config_cpups.yaml", "-o", *options, strategy=strategy)
    for worker in range(2):
        found = re.search(rf"row cache of worker {worker}: (\d+) % hits", ended.logs[f"workerlog.{worker}"])
        assert found
        assert int(found[1]) > 50


@pytest.fixture
def slot_dnn(tmp_path: Path) -> Path:
    """A copy of slot_dnn, with the data of a day and of the next one, which is read early."""
    directory = tmp_path / "slot_dnn"
    shutil.copytree(ROOT / "models" / "rank" / "slot_dnn", directory)
    for place in (directory / "data" / day / name for day in (DAY, NEXT_DAY) for name in PASSES):
        place.mkdir(parents=True)
        for part in range(2):
            shutil.copy(directory / "data" / "demo_10", place / f"part-{part}")
    for name in ("output_model", "output_model_benchdnn_queue"):
        (directory / name).mkdir()  # two workers that make it at once meet an error of Python
    return directory


def test_static_ps_trainer_trains_slot_dnn(job, slot_dnn):
    for day in (DAY, NEXT_DAY):
        shutil.rmtree(slot_dnn / "data" / day)
    # The reader has 300 slots, the yaml 408; the model has no statistics for use_auc.
    options = ["hyper_parameters.slot_num=300", "runner.use_auc=False"]
    job("static_ps_trainer.py", "-m", "config_queuedataset.yaml", "-o", *options, directory=slot_dnn)
    assert (slot_dnn / "output_model_benchdnn_queue" / "2").is_dir()


def edited(directory: Path, name: str, **values: str) -> str:
    """A copy of a yaml file with other values."""
    text = (directory / name).read_text("utf-8")
    for key, value in values.items():
        text, count = re.subn(rf"^(\s*{key}:).*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    (directory / "edited.yaml").write_text(text, "utf-8")
    return "edited.yaml"


def test_online_trainer_and_offline_inference_of_slot_dnn(job, slot_dnn):
    config = edited(slot_dnn, "config_online.yaml", end_day=f'"{DAY}"', split_interval="360")
    ended = job("static_ps_online_trainer.py", "-m", config, directory=slot_dnn)
    log = ended.logs["workerlog.0"]
    assert len(re.findall("Train Global Metric", log)) == 2
    assert "finished save base model" in log
    assert (slot_dnn / "output_model" / NEXT_DAY / "base" / "SERVING.json").is_file()
    assert (slot_dnn / "output_model" / NEXT_DAY / "0").is_dir()
    data = slot_dnn / "infer_data" / "offline"
    data.mkdir(parents=True)
    lines = (slot_dnn / "data" / "demo_10").read_text().splitlines()
    (data / "part-0").write_text("".join(f"id{number}\t{line}\n" for number, line in enumerate(lines)))
    config = edited(slot_dnn, "config_offline_infer.yaml", init_model_path=f'"output_model/{DAY}/1"')
    job("static_ps_offline_infer.py", "-m", config, directory=slot_dnn)
    dump = (slot_dnn / "dump_offline_infer" / "part-00001-00000").read_text()
    assert dump.count("\n") == len(lines)
