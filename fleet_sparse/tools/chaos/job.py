"""ChaosJob: a fleetrun of pservers and counting workers in a directory, and the faults that it gets.

What reads logs is imported where it is used: `--help` of the command waits for none of it.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.local_pservers import child_environment

from .connection_cut import cut_connections
from .etcd_server import EtcdServer, etcd_server
from .faults import OF_COORDINATOR, Fault, FaultKind
from .growth import ProcessUse
from .log_disk import LOG_DISK_BYTES, filled, log_disk
from .pauses import Moment, Pause, pauses
from .step_ends import num_steps, read
from .sync_trace import TRACE_VARIABLE, num_synced_bytes

NUM_PSERVERS = NUM_WORKERS = 2
LOG_DIRECTORY, TRACE_DIRECTORY = "logs", "synced"
SYNC_DURABILITY = "sync"
DISORDER_FILE = "disorder"
START_S, END_S = 300.0, 300.0
GEO_STEPS = 2
"""Steps of a window of a geo job."""
MAX_INFLIGHT_PUSHES = 4
"""`FLEET_SPARSE_MAX_INFLIGHT_PUSHES` of jobs whose workers are killed: one that dies loses no more pushes."""
_LEAST_UNSYNCED = 8  # records of a log that loses half of those that are not synced
_LEASE_S = 3.0
_POLL_S = 0.01
_BACKOFF = re.compile(r"is started again in (\d+\.\d) s")
_LOST = re.compile(r"shard (\d) at .*: (\d+) of \d+ pushes of this worker are lost")


def steps_per_push(mode: str) -> int:
    """Returns the number of steps that a push of a mode has."""
    return GEO_STEPS if mode == "geo" else 1


class Death(NamedTuple):
    """How the rows differ from the counts of a worker that died. The process that takes its place finds out."""

    least: int
    """Updates that were counted and are not in the row that lost most, as a negative number; or as `most`."""
    most: int
    """Updates that were not counted and are in the row that gained most."""


class Counted(NamedTuple):
    """What one worker found in the rows at the end."""

    num_steps: int
    least: int
    """Smallest number of its updates that a counting row has, without what its deaths changed."""
    most: int
    num_lost: int
    """Pushes that it reported as lost, of the shard that lost most."""
    deaths: tuple[Death, ...] = ()
    """Its deaths; none in a job that goes back to a snapshot then."""
    filled: tuple[int, int] = (1, 1)
    """Smallest and largest of its values in the other rows, which have 1 from the start."""


class ChaosJob:
    """A job that runs.

    Args:
        directory: Its directory.
        launcher: The process of fleetrun.
        recovery_s: Seconds after a fault in which all workers should make steps again.
        coordinator: The server of the coordinator; None if the logs are the coordinator.
        syncs_acks: True if pservers sync a push before they ack it.

    Attributes:
        num_cut_records: Records that power cuts took from the logs.
    """

    def __init__(
        self,
        directory: Path,
        launcher: subprocess.Popen[bytes],
        recovery_s: float,
        coordinator: EtcdServer | None,
        *,
        syncs_acks: bool,
    ) -> None:
        self._directory = directory
        self._launcher = launcher
        self._recovery_s = recovery_s
        self._coordinator = coordinator
        self._syncs_acks = syncs_acks
        self._num_deaths = [0] * NUM_WORKERS
        self._moments: list[Moment] = []
        self.num_cut_records = 0

    def start(self) -> None:
        """Waits until all workers train.

        Raises:
            FleetSparseError: They do not in time.
        """
        self._wait_for(lambda: all(self.steps(worker) > 0 for worker in range(NUM_WORKERS)), START_S, "a first step")

    def steps(self, worker: int) -> int:
        """Returns the number of steps that a worker made, with those that it made again."""
        return num_steps(self._step_ends(worker))

    def inflict(self, fault: Fault) -> None:
        """Carries out a fault and waits until all workers train again.

        Raises:
            FleetSparseError: They do not train in time, or the job ended.
        """
        self._sleep(fault.quiet_s)
        if fault.kind is FaultKind.power and not self._syncs_acks:
            self._wait_for_unsynced(fault.target)
        self._moments.append(self._moment(fault.kind))
        self._carry_out(fault)
        targets = [self.steps(worker) + 5 for worker in range(NUM_WORKERS)]
        self._wait_for(
            lambda: all(self.steps(worker) >= target for worker, target in enumerate(targets)),
            self._recovery_s,
            f"a step after: {fault.kind}",
        )

    def finish(self) -> list[Counted]:
        """Ends the training; returns what each worker counted.

        Raises:
            FleetSparseError: The job does not end well.
        """
        self._moments.append(self._moment(None))
        (self._directory / "finish").touch()
        self._wait_for(
            lambda: all("ended well" in self._log(f"workerlog.{worker}") for worker in range(NUM_WORKERS)),
            END_S,
            "its end",
        )
        if self._launcher.wait(END_S):
            raise FleetSparseError(f"chaos: fleetrun ended with exit code {self._launcher.returncode}; {self._hint}")
        return [self._counted(worker) for worker in range(NUM_WORKERS)]

    def pauses(self) -> list[tuple[FaultKind, Pause]]:
        """Returns the pause of each fault of a job that has finished, in their order."""
        ends = [read(self._step_ends(worker)) for worker in range(NUM_WORKERS)]
        return pauses(self._moments, ends, {name: self._backoffs_s(name) for name in self._supervised})

    def num_disordered_frames(self) -> int:
        """Returns the number of frames that workers delayed or doubled."""
        logs = [self._log(f"workerlog.{worker}") for worker in range(NUM_WORKERS)]
        return sum(int(count) for log in logs for count in re.findall(r"^disordered (\d+)", log, re.MULTILINE))

    def use(self) -> dict[str, ProcessUse]:
        """Returns what workers, pservers and their supervisors take, by name."""
        pids = {f"worker {worker}": self._worker(worker) for worker in range(NUM_WORKERS)}
        pids |= {f"pserver {shard}": self._pserver(shard) for shard in range(NUM_PSERVERS)}
        pids |= {f"supervisor {shard}": _parent_of(self._pserver(shard)) for shard in range(NUM_PSERVERS)}
        return {name: _use_of(pid) for name, pid in pids.items()}

    def _carry_out(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.delay | FaultKind.suspend:
                self._suspend(self._pserver(fault.target), fault.lasts_s)
            case FaultKind.coordinator | FaultKind.coordinator_kill:
                self._stop_coordinator(fault)
            case FaultKind.kill:
                os.kill(self._pserver(fault.target), signal.SIGKILL)
            case FaultKind.kill_all:
                for shard in range(NUM_PSERVERS):
                    os.kill(self._pserver(shard), signal.SIGKILL)
            case FaultKind.worker:
                self._num_deaths[fault.target] += 1
                os.kill(self._worker(fault.target), signal.SIGKILL)
            case FaultKind.connections:
                cut_connections(self._pserver(fault.target))
            case FaultKind.frames:
                file = self._directory / DISORDER_FILE
                file.touch()
                self._sleep(fault.lasts_s)
                file.unlink()
            case FaultKind.disk:
                self._fill_disk(fault)
            case FaultKind.power | FaultKind.torn:
                from .power_cut import cut_power, tear

                with self._dead(fault.target) as segment:
                    if fault.kind is FaultKind.torn:
                        tear(segment)
                    else:
                        chance = random.Random(fault.seed)
                        self.num_cut_records += cut_power(segment, self._num_synced_bytes(segment), chance)

    def _stop_coordinator(self, fault: Fault) -> None:
        assert self._coordinator is not None, "a job with such faults has one"
        if fault.kind is FaultKind.coordinator:
            self._suspend(self._coordinator.pid, fault.lasts_s)
        else:
            self._coordinator.kill()
            self._sleep(fault.lasts_s)
            self._coordinator.start()

    def _fill_disk(self, fault: Fault) -> None:
        num_starts = self._num_starts(fault.target)
        with filled(self._logs) as fill:
            os.kill(self._pserver(fault.target), signal.SIGKILL)
            until = time.monotonic() + fault.lasts_s
            while time.monotonic() < until:
                fill()
                self._sleep(_POLL_S)
            self._wait_for(
                lambda: self._num_starts(fault.target) > num_starts,
                self._recovery_s,
                f"a start on a full disk in serverlog.{fault.target}",
            )

    def _suspend(self, pid: int, lasts_s: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._sleep(lasts_s)
        with suppress(ProcessLookupError):  # the supervisor of a pserver has replaced it
            os.kill(pid, signal.SIGCONT)

    def _counted(self, worker: int) -> Counted:
        log = self._log(f"workerlog.{worker}")
        lost = [0] * NUM_PSERVERS
        for shard, count in _LOST.findall(log):
            lost[int(shard)] += int(count)
        made, least, most = map(int, re.findall(r"^counted (\d+) (-?\d+) (-?\d+)", log, re.MULTILINE)[0])
        filled_least, filled_most = map(int, re.findall(r"^filled (-?\d+) (-?\d+)", log, re.MULTILINE)[0])
        deaths = [Death(*map(int, each)) for each in re.findall(r"^death (-?\d+) (-?\d+)", log, re.MULTILINE)]
        if "resumes at" not in log and len(deaths) != self._num_deaths[worker]:
            raise FleetSparseError(
                f"chaos: worker {worker} was killed {self._num_deaths[worker]} times, and read the rows {len(deaths)} "
                f"times after that; {self._hint}"
            )
        return Counted(made, least, most, max(lost), tuple(deaths), (filled_least, filled_most))

    def _wait_for_unsynced(self, shard: int) -> None:
        """Waits until the log of a shard has records that a power cut may lose."""
        from .power_cut import last_segment, unsynced_records

        def has_enough() -> bool:
            segment = last_segment(self._log_of(shard))
            return len(unsynced_records(segment, self._num_synced_bytes(segment))) >= _LEAST_UNSYNCED

        self._wait_for(has_enough, self._recovery_s, f"records in the log of shard {shard}")

    def _num_synced_bytes(self, segment: Path) -> int:
        return num_synced_bytes(self._directory / TRACE_DIRECTORY, segment)

    @contextmanager
    def _dead(self, shard: int) -> Iterator[Path]:
        """Kills a pserver; yields the newest segment of its log. It is started again behind the block."""
        from .power_cut import last_segment

        pid = self._pserver(shard)
        supervisor = _parent_of(pid)
        os.kill(supervisor, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            while _state_of(pid) != "Z":
                time.sleep(_POLL_S)
            yield last_segment(self._log_of(shard))
        finally:
            os.kill(supervisor, signal.SIGCONT)

    def _moment(self, kind: FaultKind | None) -> Moment:
        steps = [self.steps(worker) for worker in range(NUM_WORKERS)]
        return Moment(kind, steps, {name: len(self._backoffs_s(name)) for name in self._supervised})

    @property
    def _logs(self) -> Path:
        return self._directory / LOG_DIRECTORY

    def _log_of(self, shard: int) -> Path:
        return self._logs / f"shard-{shard}-of-{NUM_PSERVERS}"

    def _step_ends(self, worker: int) -> Path:
        return self._directory / f"step_ends{worker}"

    @property
    def _supervised(self) -> list[str]:
        """Logs of the processes that supervisors start again."""
        return [f"serverlog.{shard}" for shard in range(NUM_PSERVERS)] + [f"workerlog.{w}" for w in range(NUM_WORKERS)]

    def _backoffs_s(self, name: str) -> list[float]:
        """Pauses before each restart of a process."""
        return [float(pause) for pause in _BACKOFF.findall(self._log(name))]

    def _num_starts(self, shard: int) -> int:
        """Returns how often a pserver began to answer."""
        return self._log(f"serverlog.{shard}").count("continues from the log")

    def _pserver(self, shard: int) -> int:
        return int(re.findall(r"starts: pid (\d+)", self._log(f"serverlog.{shard}"))[-1])

    def _worker(self, worker: int) -> int:
        return int(re.findall(r"^pid (\d+)", self._log(f"workerlog.{worker}"), re.MULTILINE)[-1])

    def _log(self, name: str) -> str:
        path = self._directory / "log" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def _sleep(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(seconds)
            raise FleetSparseError(f"chaos: the job ended with exit code {self._launcher.returncode}; {self._hint}")

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise FleetSparseError(f"chaos: no sign of {what} in {timeout_s:g} s; {self._hint}")
            if self._launcher.poll() not in (None, 0):
                self._sleep(0)
            time.sleep(_POLL_S)

    @property
    def _hint(self) -> str:
        where = self._directory / "log"
        return f"what its processes said is in {where}, and the logs of its pservers are in {self._logs}"


@contextmanager
def chaos_job(
    directory: Path,
    mode: str,
    durability: str,
    kinds: Collection[FaultKind],
    *,
    num_rows: int,
    row_lag: int,
    recovery_s: float,
) -> Iterator[ChaosJob]:
    """Runs a job in an empty directory; ends all of its processes with the block.

    Args:
        directory: Directory of the job.
        mode: Mode of training: async, lag, geo or sync.
        durability: `FLEET_SPARSE_DURABILITY` of its pservers.
        kinds: Kinds of the faults that it will get.
        num_rows: Rows of its table.
        row_lag: Bound of updates of its row caches; 0 for none.
        recovery_s: As of `ChaosJob`.

    Raises:
        FleetSparseError: The machine lacks what one of the kinds needs.
    """
    program = directory / "program.py"  # fleetrun takes no module
    program.write_text(f"from {__package__}.counting import main\n\nmain()\n")
    command: Sequence[str] = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", "log"]
    command = [*command, "--server_num", str(NUM_PSERVERS), "--worker_num", str(NUM_WORKERS)]
    command = [*command, str(program), "--mode", mode, "--geo-steps", str(GEO_STEPS)]
    command = [*command, "--rows", str(num_rows), "--row-lag", str(row_lag)]
    environment = child_environment(
        FLEET_SPARSE_DURABILITY=durability,
        FLEET_SPARSE_LOG=str(directory / LOG_DIRECTORY),
        OMP_NUM_THREADS="1",
    )
    environment.pop("FLEET_SPARSE_RESTARTS", None)
    quiet = subprocess.DEVNULL
    with ExitStack() as stack:
        coordinator = None
        if FaultKind.power in kinds:
            environment["FLEET_SPARSE_RULES"] = num_synced_bytes.__module__
            environment[TRACE_VARIABLE] = str(directory / TRACE_DIRECTORY)
            environment["FLEET_SPARSE_LOG_SYNC_S"] = "1000"  # a pserver syncs only what it waits for
        if FaultKind.worker in kinds:
            command = [*command, "--restart-workers"]
            environment["FLEET_SPARSE_MAX_INFLIGHT_PUSHES"] = str(MAX_INFLIGHT_PUSHES)
        if FaultKind.frames in kinds:
            command = [*command, "--disordered-frames"]
        if FaultKind.disk in kinds:
            stack.enter_context(log_disk(directory / LOG_DIRECTORY, LOG_DISK_BYTES))
        if any(kind in OF_COORDINATOR for kind in kinds):
            coordinator = stack.enter_context(etcd_server(directory / "etcd"))
            environment["FLEET_SPARSE_COORDINATOR"] = f"etcd://{coordinator.address}/chaos"
            environment["FLEET_SPARSE_LEASE_S"] = str(_LEASE_S)
        launcher = stack.enter_context(
            subprocess.Popen(
                command, cwd=directory, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
            )
        )
        try:
            yield ChaosJob(directory, launcher, recovery_s, coordinator, syncs_acks=durability == SYNC_DURABILITY)
        finally:
            # A signal ends fleetrun but not its children, which are in its process group.
            with suppress(ProcessLookupError):  # all of them ended by themselves
                os.killpg(launcher.pid, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    return int(_stat_of(pid)[1])


def _state_of(pid: int) -> str:
    return _stat_of(pid)[0]


def _stat_of(pid: int) -> list[str]:
    """State, parent and the other fields behind the name of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _use_of(pid: int) -> ProcessUse:
    status = Path(f"/proc/{pid}/status").read_text()
    kib = int(re.findall(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)[0])
    return ProcessUse(pid, kib << 10, len(list(Path(f"/proc/{pid}/fd").iterdir())), time.monotonic())
