"""A pserver of a job that dies and is started again: real fleetrun, real pservers, real Paddle."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fleet_sparse.core.rules import RULES as ALL_RULES
from fleet_sparse.tools.chaos import sync_trace
from fleet_sparse.tools.chaos.power_cut import cut_power, last_segment, unsynced_records
from support.jobs import SCRIPTS, TIMEOUT_S, environment

SCRIPT = "counting.py"
SEED = 1
"""Loses all pages of a log that were not synced."""
RULES = ("sgd", "adagrad", "adam", "adamw", "adamax", "momentum", "rmsprop", "lamb", "ftrl")
"""The rules of Paddle's optimizers, and FTRL."""


def test_all_rules_that_train_are_listed() -> None:
    of_gradients = {name for name, rule in ALL_RULES.items() if not rule.is_summed and rule.kernel is not None}
    assert of_gradients - {"ctr_adagrad", "overwrite", "delta"} == set(RULES)


class RunningJob:
    """A fleetrun of 2 pservers and some workers, and its logs."""

    def __init__(self, launcher: subprocess.Popen[str], directory: Path, num_workers: int) -> None:
        self.launcher = launcher
        self._directory = directory
        self._num_workers = num_workers

    def log(self, name: str) -> str:
        path = self._directory / "log" / name
        return path.read_text() if path.exists() else ""

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = {path.name: path.read_text()[-3000:] for path in (self._directory / "log").glob("*log.*")}
            assert time.monotonic() < deadline, logs
            assert self.launcher.poll() is None, logs
            time.sleep(0.05)

    def steps(self, worker: int) -> int:
        return max(map(int, re.findall(r"^step (\d+)", self.log(f"workerlog.{worker}"), re.M)), default=0)

    def wait_for_steps(self, num_steps: int) -> None:
        """Waits until each worker has made so many more steps."""
        targets = [self.steps(worker) + num_steps for worker in range(self._num_workers)]
        self.wait_for(lambda: all(self.steps(worker) >= target for worker, target in enumerate(targets)))

    def pserver_pid(self, shard: int) -> int:
        return int(re.findall(r"starts: pid (\d+)", self.log(f"serverlog.{shard}"))[-1])

    def worker_pids(self, worker: int) -> list[int]:
        return [int(pid) for pid in re.findall(r"^pid (\d+)", self.log(f"workerlog.{worker}"), re.M)]

    def finish(self) -> None:
        (self._directory / "finish").touch()
        workers = range(self._num_workers)
        self.wait_for(lambda: all("ended well" in self.log(f"workerlog.{worker}") for worker in workers))
        self.launcher.wait(TIMEOUT_S)


@contextmanager
def running_job(
    directory: Path, script: str = SCRIPT, *, num_workers: int = 2, run_mode: str = "", **variables: str
) -> Iterator[RunningJob]:
    """Runs a script under fleetrun, or under the other launcher of Paddle in its `run_mode`."""
    command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", "log"]
    command += ["--run_mode", run_mode, "--trainer_num"] if run_mode else ["--worker_num"]
    command += [str(num_workers), "--server_num", "2", str(SCRIPTS / script)]
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment(**{"FLEET_SPARSE_STANDBY": "1", **variables}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            yield RunningJob(launcher, directory, num_workers)
        finally:
            # A signal ends fleetrun but not its children, which are in its process group.
            with suppress(ProcessLookupError):  # all of them ended by themselves
                os.killpg(launcher.pid, signal.SIGKILL)


def lost_pushes(log: str) -> dict[int, int]:
    """Pushes that a worker reported as lost, by shard."""
    lost = {0: 0, 1: 0}
    for shard, count in re.findall(r"shard (\d) at .*: (\d+) of \d+ pushes of this worker are lost", log):
        lost[int(shard)] += int(count)
    return lost


def check_counts(job: RunningJob, steps_per_push: int, workers: Sequence[int] = (0, 1)) -> None:
    """Checks that each row has exactly the steps of its worker that were not reported as lost."""
    for worker in workers:
        log = job.log(f"workerlog.{worker}")
        lost = lost_pushes(log)
        num_steps, *counts = map(int, re.findall(r"^counted (.*)", log, re.M)[0].split())
        assert {num_steps - count for count in counts} == {steps_per_push * each for each in lost.values()}, log


@pytest.mark.guarantee("A8")
@pytest.mark.parametrize(
    ("mode", "steps_per_push"),
    [("async", 1), pytest.param("lag", 1, marks=pytest.mark.slow), pytest.param("geo", 2, marks=pytest.mark.slow)],
)
def test_killed_pserver_costs_the_reported_pushes_only(tmp_path: Path, mode: str, steps_per_push: int) -> None:
    with running_job(tmp_path, MODE=mode) as job:
        job.wait_for(lambda: "saved" in job.log("workerlog.0"))
        job.wait_for_steps(100)
        for shard in (1, 0):
            os.kill(job.pserver_pid(shard), signal.SIGKILL)
            job.wait_for_steps(100)
        job.finish()
        assert job.launcher.returncode == 0
        for worker in range(2):
            assert all(lost_pushes(job.log(f"workerlog.{worker}")).values()), job.log(f"workerlog.{worker}")
        check_counts(job, steps_per_push)


@pytest.mark.guarantee("W7")
@pytest.mark.parametrize(
    ("mode", "steps_per_push"),
    [
        ("async", 1),
        ("sync", 1),
        pytest.param("lag", 1, marks=pytest.mark.slow),
        pytest.param("geo", 2, marks=pytest.mark.slow),
    ],
)
def test_killed_pserver_with_a_log_loses_and_doubles_nothing(tmp_path: Path, mode: str, steps_per_push: int) -> None:
    with running_job(tmp_path, MODE=mode, FLEET_SPARSE_DURABILITY="log") as job:
        job.wait_for_steps(100)
        for shard in (1, 0, 1):
            os.kill(job.pserver_pid(shard), signal.SIGKILL)
            job.wait_for_steps(100)
        job.finish()
        assert job.launcher.returncode == 0
        for worker in range(2):
            assert lost_pushes(job.log(f"workerlog.{worker}")) == {0: 0, 1: 0}
        check_counts(job, steps_per_push)


def traced(directory: Path) -> dict[str, str]:
    """Variables of a job whose pservers sync only what they wait for, and note it."""
    return {
        "FLEET_SPARSE_DURABILITY": "log",
        "FLEET_SPARSE_LOG_SYNC_S": "1000",
        "FLEET_SPARSE_RULES": sync_trace.__name__,
        sync_trace.TRACE_VARIABLE: str(directory / "synced"),
    }


def lose_power(job: RunningJob, shard: int, directory: Path, num_records: int = 1) -> None:
    """Kills a pserver of a traced job and loses what its log had not synced, at least `num_records` records."""

    def unsynced() -> tuple[Path, int, list[int]]:
        segment = last_segment(directory / "log" / f"shard-{shard}-of-2")
        num_bytes = sync_trace.num_synced_bytes(directory / "synced", segment)
        return segment, num_bytes, unsynced_records(segment, num_bytes)

    pid = job.pserver_pid(shard)
    supervisor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGSTOP)
        while len(unsynced()[2]) < 2 * num_records:
            os.kill(pid, signal.SIGCONT)
            job.wait_for_steps(num_records)
            os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        segment, num_bytes, _ = unsynced()
        assert cut_power(segment, num_bytes, random.Random(SEED)) >= num_records
    finally:
        os.kill(supervisor, signal.SIGCONT)


@pytest.mark.guarantee("W10")
@pytest.mark.parametrize(
    ("mode", "steps_per_push"),
    [
        pytest.param("async", 1, marks=pytest.mark.slow),
        ("sync", 1),
        pytest.param("lag", 1, marks=pytest.mark.slow),
        pytest.param("geo", 2, marks=pytest.mark.slow),
    ],
)
def test_power_cut_with_a_log_loses_and_doubles_nothing(tmp_path: Path, mode: str, steps_per_push: int) -> None:
    with running_job(tmp_path, MODE=mode, **traced(tmp_path)) as job:
        job.wait_for(lambda: "saved" in job.log("workerlog.0"))
        job.wait_for_steps(100)
        for shard in (1, 0, 1):
            lose_power(job, shard, tmp_path, num_records=10)
            job.wait_for_steps(100)
        job.finish()
        assert job.launcher.returncode == 0
        for worker in range(2):
            assert lost_pushes(job.log(f"workerlog.{worker}")) == {0: 0, 1: 0}
        check_counts(job, steps_per_push)


def losses_of_logged_job(
    directory: Path, kills: Sequence[int], num_workers: int, *, loses_power: bool = False, **variables: str
) -> list[str]:
    """Runs a sync job with a log, whose pservers are killed in this order; returns the losses of each worker."""
    directory.mkdir()
    variables |= traced(directory) if loses_power else {"FLEET_SPARSE_DURABILITY": "log"}
    with running_job(directory, "logged.py", num_workers=num_workers, **variables) as job:
        for shard in kills:
            job.wait_for_steps(40)
            if loses_power:
                lose_power(job, shard, directory)
            else:
                os.kill(job.pserver_pid(shard), signal.SIGKILL)
        job.finish()
        assert job.launcher.returncode == 0
    losses = [(directory / f"losses{worker}").read_text() for worker in range(num_workers)]
    assert [len(each.splitlines()) for each in losses] == [300] * num_workers
    return losses


@pytest.mark.guarantee("W7")
@pytest.mark.guarantee("W8")
@pytest.mark.parametrize(
    ("num_workers", "look_ahead", "clip"),
    [
        (2, "1", "1"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in [(2, "1", ""), (2, "", "1"), (1, "", ""), (1, "1", "1")]
        ),
    ],
)
def test_killed_pserver_with_a_log_changes_no_loss_by_a_bit(
    tmp_path: Path, num_workers: int, look_ahead: str, clip: str
) -> None:
    variables = {"LOOK_AHEAD": look_ahead, "CLIP": clip}
    undisturbed = losses_of_logged_job(tmp_path / "undisturbed", [], num_workers, **variables)
    assert losses_of_logged_job(tmp_path / "killed", [0, 1, 0, 0], num_workers, **variables) == undisturbed


@pytest.mark.slow
@pytest.mark.guarantee("W7")
@pytest.mark.parametrize("clip", ["", "1"], ids=["no clip", "clip"])
@pytest.mark.parametrize("rule", RULES)
def test_killed_pserver_changes_no_loss_of_any_rule(tmp_path: Path, rule: str, clip: str) -> None:
    variables = {"RULE": rule, "CLIP": clip}
    undisturbed = losses_of_logged_job(tmp_path / "undisturbed", [], 2, **variables)
    assert losses_of_logged_job(tmp_path / "killed", [0, 1], 2, **variables) == undisturbed


@pytest.mark.slow
@pytest.mark.guarantee("W10")
@pytest.mark.parametrize(
    ("num_workers", "look_ahead", "clip"), [(2, "", ""), (2, "1", ""), (1, "", ""), (2, "", "1"), (2, "1", "1")]
)
def test_power_cut_with_a_log_changes_no_loss_by_a_bit(
    tmp_path: Path, num_workers: int, look_ahead: str, clip: str
) -> None:
    variables = {"LOOK_AHEAD": look_ahead, "CLIP": clip}
    undisturbed = losses_of_logged_job(tmp_path / "undisturbed", [], num_workers, **variables)
    disturbed = losses_of_logged_job(tmp_path / "cut", [0, 1, 0], num_workers, loses_power=True, **variables)
    assert disturbed == undisturbed


@pytest.mark.slow
@pytest.mark.guarantee("H4")
@pytest.mark.parametrize(("look_ahead", "clip"), [("", ""), ("1", "1")])
@pytest.mark.parametrize("loses_power", [False, True], ids=["killed", "power cut"])
def test_row_cache_of_one_worker_survives_its_pservers(
    tmp_path: Path, look_ahead: str, clip: str, loses_power: bool
) -> None:
    variables = {"LOOK_AHEAD": look_ahead, "CLIP": clip}
    undisturbed = losses_of_logged_job(tmp_path / "undisturbed", [], 1, **variables)
    variables["ROW_CACHE"] = "1"
    disturbed = losses_of_logged_job(tmp_path / "disturbed", [0, 1, 0], 1, loses_power=loses_power, **variables)
    assert disturbed == undisturbed


@pytest.mark.slow
def test_suspended_pserver_is_replaced_after_the_stall_time(tmp_path: Path) -> None:
    with running_job(tmp_path, FLEET_SPARSE_STALL_S="8") as job:
        job.wait_for(lambda: "saved" in job.log("workerlog.0"))
        job.wait_for_steps(50)
        os.kill(job.pserver_pid(1), signal.SIGSTOP)
        job.wait_for_steps(50)
        job.finish()
        check_counts(job, 1)
        assert "FLEET_SPARSE_STALL_S" in job.log("serverlog.1")


def test_pserver_that_is_suspended_for_a_moment_loses_nothing(tmp_path: Path) -> None:
    with running_job(tmp_path) as job:
        job.wait_for_steps(50)
        pid = job.pserver_pid(1)
        os.kill(pid, signal.SIGSTOP)
        stopped = [job.steps(worker) for worker in range(2)]
        job.wait_for(lambda: "no answer, reconnecting" in job.log("workerlog.0"))
        os.kill(pid, signal.SIGCONT)
        job.wait_for(lambda: all(job.steps(worker) > stopped[worker] + 50 for worker in range(2)))
        job.finish()
        check_counts(job, 1)
        assert job.pserver_pid(1) == pid


@pytest.mark.slow
@pytest.mark.guarantee("F1")
@pytest.mark.parametrize("mode", ["async", "lag", "geo"])
def test_job_ends_with_a_pserver_that_nobody_starts_again(tmp_path: Path, mode: str) -> None:
    variables = {"FLEET_SPARSE_DURABILITY": "none", "FLEET_SPARSE_DEADLINE_S": "3"}
    with running_job(tmp_path, MODE=mode, **variables) as job:
        job.wait_for(lambda: "saved" in job.log("workerlog.0"))
        job.wait_for_steps(50)
        os.kill(job.pserver_pid(1), signal.SIGKILL)
        job.launcher.wait(TIMEOUT_S)
        assert all("ShardUnavailable: shard 1 at" in job.log(f"workerlog.{worker}") for worker in range(2))


@pytest.mark.guarantee("W7")
@pytest.mark.parametrize(
    ("mode", "durability"), [("async", "snapshot"), pytest.param("sync", "log", marks=pytest.mark.slow)]
)
def test_worker_that_starts_follows_a_killed_pserver(tmp_path: Path, mode: str, durability: str) -> None:
    """Worker 0 waits for the other one before it connects, at the pserver that dies."""
    with running_job(tmp_path, MODE=mode, WAITS="1", FLEET_SPARSE_DURABILITY=durability) as job:
        job.wait_for(lambda: all("worker 0 of 2 registered" in job.log(f"serverlog.{shard}") for shard in range(2)))
        pids = [job.pserver_pid(shard) for shard in range(2)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda: job.log("workerlog.0").count("was started again") == 2)
        (tmp_path / "goes").touch()
        job.wait_for_steps(100)
        job.finish()
        check_counts(job, 1)


@pytest.mark.guarantee("F2")
def test_sync_job_names_its_last_snapshot_when_a_pserver_died(tmp_path: Path) -> None:
    with running_job(tmp_path, MODE="sync") as job:
        job.wait_for(lambda: "saved" in job.log("workerlog.0"))
        os.kill(job.pserver_pid(1), signal.SIGKILL)
        job.launcher.wait(TIMEOUT_S)
        assert any("ShardUnavailable: shard 1" in job.log(f"workerlog.{worker}") for worker in range(2))


@pytest.mark.slow
@pytest.mark.guarantee("F6")
def test_worker_that_dies_with_the_pservers_returns_to_its_job(tmp_path: Path) -> None:
    with running_job(tmp_path, FLEET_SPARSE_RESTARTS="3", FLEET_SPARSE_DURABILITY="log") as job:
        job.wait_for_steps(50)
        for shard in range(2):
            os.kill(job.pserver_pid(shard), signal.SIGKILL)
        os.kill(job.worker_pids(1)[0], signal.SIGKILL)
        job.wait_for(lambda: len(job.worker_pids(1)) == 2)
        job.wait_for(lambda: job.log("workerlog.1").count("step 50\n") == 2)
        job.finish()
        check_counts(job, 1, workers=[0])
        assert job.launcher.returncode == 0


@pytest.mark.guarantee("A6")
@pytest.mark.parametrize(
    "resumes",
    [
        pytest.param("", id="script that begins", marks=pytest.mark.slow),
        pytest.param("1", id="script that resumes"),
    ],
)
def test_killed_worker_is_started_again_and_trains_on(tmp_path: Path, resumes: str) -> None:
    with running_job(tmp_path, FLEET_SPARSE_RESTARTS="3", RESUMES=resumes) as job:
        job.wait_for_steps(50)
        os.kill(job.worker_pids(1)[0], signal.SIGKILL)
        job.wait_for(lambda: len(job.worker_pids(1)) == 2)
        job.wait_for(lambda: job.log("workerlog.1").count("step 50\n") == 2)
        job.finish()
        check_counts(job, 1, workers=[0])
        assert job.launcher.returncode == 0


@pytest.mark.guarantee("A9")
@pytest.mark.parametrize(
    ("durability", "kills"),
    [
        ("snapshot", [1]),
        pytest.param("snapshot", [0, 1, 0, 1], marks=pytest.mark.slow),
        pytest.param("log", [1, 0], marks=pytest.mark.slow),
        pytest.param("none", [1], marks=pytest.mark.slow),
    ],
)
def test_killed_worker_with_bounded_lag_makes_each_step_once(
    tmp_path: Path, durability: str, kills: Sequence[int]
) -> None:
    with running_job(tmp_path, MODE="lag", FLEET_SPARSE_RESTARTS="9", FLEET_SPARSE_DURABILITY=durability) as job:
        for worker in kills:
            job.wait_for_steps(100)
            num_lives = len(job.worker_pids(worker))
            os.kill(job.worker_pids(worker)[-1], signal.SIGKILL)
            job.wait_for(lambda w=worker, n=num_lives: len(job.worker_pids(w)) == n + 1)
        job.wait_for_steps(100)
        job.finish()
        check_counts(job, 1)
        assert job.launcher.returncode == 0


@pytest.mark.slow
@pytest.mark.guarantee("F6")
@pytest.mark.parametrize("num_pservers", [1, 2])
def test_worker_with_bounded_lag_dies_with_logged_pservers(tmp_path: Path, num_pservers: int) -> None:
    with running_job(tmp_path, MODE="lag", FLEET_SPARSE_RESTARTS="9", FLEET_SPARSE_DURABILITY="log") as job:
        job.wait_for_steps(600)
        for shard in range(num_pservers):
            os.kill(job.pserver_pid(shard), signal.SIGKILL)
        os.kill(job.worker_pids(1)[0], signal.SIGKILL)
        job.wait_for(lambda: len(job.worker_pids(1)) == 2)
        job.wait_for_steps(100)
        job.finish()
        check_counts(job, 1)
        assert job.launcher.returncode == 0


@pytest.mark.slow
def test_script_with_bounded_lag_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    with running_job(tmp_path, MODE="lag", FLEET_SPARSE_RESTARTS="9", FAILS="100") as job:
        job.launcher.wait(60)
        assert "WorkerLost" in job.log("workerlog.0")


Kill = Sequence[tuple[str, int]]
"""Role and index of processes that are killed together."""


def losses_of_resumed_job(directory: Path, kills: Sequence[Kill], **variables: str) -> list[dict[int, str]]:
    """Runs the job, in which processes are killed; returns the last loss of each step, by worker."""
    directory.mkdir()
    with running_job(directory, "resuming.py", FLEET_SPARSE_RESTARTS="10", **variables) as job:
        for number, kill in enumerate(kills, 1):
            job.wait_for(lambda n=number: all(job.log(f"workerlog.{w}").count("waits\n") == n for w in range(2)))
            for role, index in kill:
                os.kill(job.worker_pids(index)[-1] if role == "worker" else job.pserver_pid(index), signal.SIGKILL)
            (directory / f"go{number}").touch()
        job.wait_for(lambda: all("ended well" in job.log(f"workerlog.{worker}") for worker in range(2)))
        assert job.launcher.wait(TIMEOUT_S) == 0
        logs = [job.log(f"workerlog.{worker}") for worker in range(2)]
    assert [log.count("resumes at") for log in logs] == [1 + len(kills)] * 2
    written = [(directory / f"losses{worker}").read_text().splitlines() for worker in range(2)]
    return [{int(step): loss for step, loss in map(str.split, lines)} for lines in written]


@pytest.mark.guarantee("S8")
@pytest.mark.parametrize(
    ("rule", "clip", "kills"),
    [
        ("adam", "", [[("worker", 1)], [("pserver", 0)]]),
        pytest.param("adam", "1", [[("pserver", 1)], [("worker", 0)]], marks=pytest.mark.slow),
        *(
            pytest.param(rule, clip, [[("worker", 0)]], marks=pytest.mark.slow)
            for rule in RULES
            for clip in ("", "1")
            if rule != "adam"
        ),
    ],
)
def test_killed_sync_job_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path, rule: str, clip: str, kills: Sequence[Kill]
) -> None:
    undisturbed = losses_of_resumed_job(tmp_path / "undisturbed", [], RULE=rule, CLIP=clip)
    assert [sorted(losses) for losses in undisturbed] == [list(range(1, 121))] * 2
    assert losses_of_resumed_job(tmp_path / "killed", kills, RULE=rule, CLIP=clip, KILLS=str(len(kills))) == undisturbed


@pytest.mark.slow
@pytest.mark.guarantee("S8")
@pytest.mark.parametrize("durability", ["none", "log", "sync"])
def test_killed_sync_worker_changes_no_loss(tmp_path: Path, durability: str) -> None:
    undisturbed = losses_of_resumed_job(tmp_path / "undisturbed", [])
    variables = {"KILLS": "1", "FLEET_SPARSE_DURABILITY": durability}
    assert losses_of_resumed_job(tmp_path / "killed", [[("worker", 1)]], **variables) == undisturbed


@pytest.mark.slow
@pytest.mark.guarantee("F6")
@pytest.mark.parametrize("num_pservers", [1, 2])
def test_sync_worker_dies_with_logged_pservers_changes_no_loss(tmp_path: Path, num_pservers: int) -> None:
    undisturbed = losses_of_resumed_job(tmp_path / "undisturbed", [])
    kill = [("worker", 1), *(("pserver", shard) for shard in range(num_pservers))]
    variables = {"KILLS": "1", "FLEET_SPARSE_DURABILITY": "log"}
    assert losses_of_resumed_job(tmp_path / "killed", [kill], **variables) == undisturbed


@pytest.mark.slow
def test_launcher_in_mode_ps_sees_no_pserver_die(tmp_path: Path) -> None:
    with running_job(tmp_path, run_mode="ps") as job:
        job.wait_for(lambda: "saved" in job.log("workerlog.0"))
        for shard in (1, 0):
            job.wait_for_steps(50)
            os.kill(job.pserver_pid(shard), signal.SIGKILL)
        job.wait_for_steps(50)
        job.finish()
        assert job.launcher.returncode == 0
        check_counts(job, 1)
