"""One pserver process, over real gRPC and ZeroMQ."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.control_socket import socket_path
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import FleetSparseError, SnapshotError
from fleet_sparse.lifeline import LIFELINE, TRY_AGAIN
from fleet_sparse.local_pservers import PserverProcess, child_environment
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Channel, Settings
from fleet_sparse.supervise import STANDBY
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.worker.control.save import Save
from fleet_sparse.worker.modes.step import Progress
from fleet_sparse.worker.net.shard_link import is_older
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.controls import barrier, registration
from support.pserver_job import connected
from support.pserver_job import save as save_alone
from support.pservers import RemotePserver
from support.shards import CLUSTER, SGD, FrameClient, floats, ids_of, push
from support.sync_worker import MODE, TABLE, SyncWorker
from support.threads import in_threads

END_S = 60.0
TESTS = Path(__file__).parent.parent


class Pserver(PserverProcess):
    """A pserver process with a connection to it."""

    log: Path

    @cached_property
    def remote(self) -> RemotePserver:
        """A worker's connection; waits until the pserver is ready."""
        return RemotePserver(self.endpoint)

    def close(self) -> None:
        if "remote" in self.__dict__:
            self.remote.close()
        self.kill()


Start = Callable[..., Pserver]


@contextmanager
def starting(directory: Path) -> Iterator[Start]:
    """Starts a pserver with these arguments and environment variables; it ends with the block."""
    numbers = count()
    with ExitStack() as stack:

        def started(*arguments: str, shard: int = 0, num_shards: int = 1, **variables: str) -> Pserver:
            pserver = Pserver(
                shard,
                num_shards,
                *arguments,
                cluster_id=CLUSTER,
                directory=directory,
                environment={"FLEET_SPARSE_ROOT": str(directory), **variables},
                log=directory / f"pserver-{next(numbers)}.log",
            )
            stack.callback(pserver.close)
            return pserver

        yield started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts pservers that end with the test."""
    with starting(tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pserver]:
    """A pserver for tests that push nothing."""
    with starting(tmp_path_factory.mktemp("unchanged")) as started:
        yield started()


@pytest.fixture
def few_files() -> Iterator[int]:
    """Lowers the limit of open files of this process and its children; returns the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_limit_of_open_files_is_that_of_the_machine(start: Start, few_files: int) -> None:
    pserver = start()
    assert pserver.remote is not None
    assert resource.prlimit(pserver.process.pid, resource.RLIMIT_NOFILE) == (few_files, few_files)


# Workers that wait for each other's steps


QUICK = Settings(deadline_s=0.5, retry_s=0.1, heartbeat_s=0.05)
LOST_S = 1.0


def test_pserver_loads_no_linear_algebra(unchanged: Pserver) -> None:
    assert unchanged.endpoint  # it is ready
    assert "/scipy/linalg/" not in Path(f"/proc/{unchanged.process.pid}/maps").read_text()


@contextmanager
def sync_job(
    start: Start, settings: Settings = QUICK, *, num_workers: int = 2, here: int = 2, lost_s: float = LOST_S
) -> Iterator[tuple[list[Pserver], list[SyncWorker]]]:
    """Two pservers and the workers of a job, of which `here` are in this process."""
    variables = {"FLEET_SPARSE_WORKER_LOST_S": str(lost_s), "FLEET_SPARSE_HEARTBEAT_S": str(QUICK.heartbeat_s)}
    pservers = [start(shard=shard, num_shards=2, **variables) for shard in range(2)]
    endpoints = [pserver.endpoint for pserver in pservers]
    with ExitStack() as stack:
        workers = []
        for index in range(here):
            _, client = stack.enter_context(connected(endpoints, [TABLE], settings, index, num_workers, MODE))
            workers.append(SyncWorker(client, 2))
        yield pservers, workers
        for worker in workers:
            with suppress(FleetSparseError):  # which the test has seen, or that the other worker brought about
                worker.client.close()


@contextmanager
def other_worker(pservers: list[Pserver], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Worker 1, a process of its own; it ends with the block."""
    command = [sys.executable, "-m", "support.sync_worker", "--num-workers", "2", "--worker", "1", *arguments]
    command += ["--endpoints", *(pserver.endpoint for pserver in pservers)]
    with subprocess.Popen(command, cwd=TESTS, env=child_environment(), stdout=subprocess.PIPE) as other:
        try:
            yield other
        finally:
            other.kill()


def test_worker_that_holds_the_gil_is_not_lost(start: Start) -> None:
    lost_s = 2 * LOST_S  # a busy machine delays signs of life, too
    settings = replace(QUICK, deadline_s=lost_s)
    with (
        sync_job(start, settings, here=1, lost_s=lost_s) as (pservers, (worker,)),
        other_worker(pservers, "--hold-gil-s", str(3 * lost_s)) as other,
    ):
        assert worker.pull() == 0
        worker.push()
        begun_s = time.monotonic()
        assert worker.pull() == 2
        assert other.stdout is not None
        held_s = float(other.stdout.readline().split()[-1])
        assert held_s > 2 * lost_s
        assert time.monotonic() - begun_s > lost_s
        assert not any(" is lost" in pserver.log.read_text() for pserver in pservers)


@pytest.mark.guarantee("S7")
def test_others_wait_for_a_worker_that_evaluates(start: Start) -> None:
    with sync_job(start) as (_, (first, second)):
        first.push()
        pending, out = first.start_pull()
        until = time.monotonic() + 2 * LOST_S  # several deadlines
        while time.monotonic() < until:
            assert second.pull() == 0
            time.sleep(QUICK.heartbeat_s)
        second.push()
        pending.wait()
        assert set(out.flat) == {2.0}
        in_threads(first.client.leave, second.client.leave)


def save(dirname: str, *remotes: RemotePserver) -> None:
    """As worker 0 does, without other workers."""
    finished = save_without_an_end(dirname, *remotes)
    for remote in remotes:
        remote.call(messages.EndSaveRequest(save_id="x", committed=True, checksum=finished.checksum))


def save_without_an_end(dirname: str, *remotes: RemotePserver) -> messages.FinishSaveReply:
    """Saves; the pservers do not hear that the snapshot is complete."""
    plan = remotes[0].call(messages.PlanSaveRequest(dirname=dirname, save_id="x", kind="full"))
    begin = messages.BeginSaveRequest(plan=plan, position=messages.WorkerPosition(worker_index=0))
    for remote in remotes:
        remote.call(begin)
    files = [remote.call(messages.WriteSaveRequest(save_id="x")) for remote in remotes]
    finished: messages.FinishSaveReply = remotes[0].call(
        messages.FinishSaveRequest(plan=plan, files=files, keep_last=1)
    )
    return finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_with_0(start: Start, number: int) -> None:
    pserver = start()
    pserver.remote.register(SGD)
    pserver.process.send_signal(number)
    assert pserver.wait(END_S) == 0
    assert f"{signal.Signals(number).name}: stopping" in pserver.log.read_text()


def test_signal_that_is_ignored_does_not_end_it(start: Start) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a job in the background of a shell
    try:
        pserver = start()
    finally:
        signal.signal(signal.SIGINT, before)
    pserver.remote.register(SGD)
    pserver.process.send_signal(signal.SIGINT)
    pserver.process.send_signal(signal.SIGTERM)
    assert pserver.wait(END_S) == 0
    assert "SIGINT" not in pserver.log.read_text()


def test_signal_stops_it_during_a_save_and_a_load(start: Start) -> None:
    pserver = start()
    client = FrameClient(pserver.remote.register(SGD))
    for begin in range(0, 400_000, 200_000):
        ids = np.arange(begin, begin + 200_000)
        assert client.push(push(SGD, ids, np.ones((len(ids), 2), np.float32))).error is None
    save("model", pserver.remote)
    plan = pserver.remote.call(messages.PlanSaveRequest(dirname="model", save_id="y", kind="full"))
    pserver.remote.call(messages.BeginSaveRequest(plan=plan, position=messages.WorkerPosition(worker_index=0)))
    pserver.remote.start_call(messages.WriteSaveRequest(save_id="y"))
    pserver.remote.start_call(messages.StageLoadRequest(dirname="model", load_id="l"))
    pserver.process.send_signal(signal.SIGTERM)
    assert pserver.wait(END_S) == 0
    assert "Traceback" not in pserver.log.read_text()
    assert start("--load", "model").remote.register(SGD).tables[0].num_rows == 400_000


def takes_sigterm(process: int, thread: int) -> bool:
    """libzmq's own threads block signals: one sent to them alone would wait for ever."""
    status = Path(f"/proc/{process}/task/{thread}/status").read_text()
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
    return not blocked >> (signal.SIGTERM - 1) & 1


def test_signal_taken_by_another_thread_stops_it_too(start: Start) -> None:
    pserver = start()
    pserver.remote.register(SGD)
    process = pserver.process.pid
    threads = map(int, os.listdir(f"/proc/{process}/task"))
    other = next(thread for thread in threads if thread != process and takes_sigterm(process, thread))
    assert ctypes.CDLL(None).tgkill(process, other, signal.SIGTERM) == 0
    assert pserver.wait(END_S) == 0


def test_signal_before_it_is_ready_ends_it_with_0(start: Start) -> None:
    pserver = start()
    while "starts" not in pserver.log.read_text():
        assert pserver.process.poll() is None
    pserver.terminate()
    assert pserver.wait(END_S) == 0


WAITING = "import threading\nthreading.Thread(target=threading.Event().wait).start()\nRULES = []\n"
SIGNAL_IN_A_RECORD = """
import io, os, signal, sys

RULES = []

class Stream(io.RawIOBase):
    is_signaled = False

    def writable(self):
        return True

    def write(self, data):
        if b"{record}" in bytes(data) and not self.is_signaled:
            self.is_signaled = True
            os.kill(os.getpid(), signal.SIGTERM)
        return os.write(2, data)

sys.stderr = io.TextIOWrapper(io.BufferedWriter(Stream()), line_buffering=True)
"""
FAILING = "from fleet_sparse.pserver import command_line\ncommand_line.serve = None\n"


def with_module(start: Start, directory: Path, text: str) -> Pserver:
    """A pserver that imports this module of custom rules."""
    (directory / "given_rules.py").write_text(text)
    path = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    return start(FLEET_SPARSE_RULES="given_rules", PYTHONPATH=path)


@pytest.mark.parametrize("record", ["shard 0 of 1 starts", "shard 0 is ready"])
def test_signal_in_the_write_of_a_record_ends_it_with_0(start: Start, tmp_path: Path, record: str) -> None:
    pserver = with_module(start, tmp_path, SIGNAL_IN_A_RECORD.format(record=record))
    assert pserver.wait(END_S) == 0
    assert "Logging error" not in pserver.log.read_text()


def test_threads_of_libraries_do_not_hold_up_its_end(start: Start, tmp_path: Path) -> None:
    pserver = with_module(start, tmp_path, WAITING)
    pserver.remote.register(SGD)
    pserver.terminate()
    assert pserver.wait(END_S) == 0


def test_threads_of_libraries_do_not_hold_up_an_unknown_error(start: Start, tmp_path: Path) -> None:
    pserver = with_module(start, tmp_path, WAITING + FAILING)
    assert pserver.wait(END_S) == 1
    assert "TypeError" in pserver.log.read_text()


def test_stop_ends_the_barrier_for_waiting_workers(start: Start) -> None:
    pserver = start()
    pserver.remote.register(worker=0, num_workers=2)
    waiting: Any = pserver.remote.start_call(barrier(0))
    pserver.remote.call(messages.StopRequest())
    assert pserver.wait(END_S) == 0
    assert waiting.exception() is not None


def test_log_has_each_event_once(start: Start, tmp_path: Path) -> None:
    pserver = start()
    pserver.remote.register(SGD)
    save("model", pserver.remote)
    pserver.terminate()
    assert pserver.wait(END_S) == 0
    log = pserver.log.read_text()
    for event in (
        "shard 0 of 1 starts",
        f"control plane {pserver.endpoint}, data plane unix:",
        "worker 0 of 1 registered 1 tables: sgd",
        "saved 0 rows",
        f"finished save x: 0 rows, {tmp_path}/model/000001-full",
        "SIGTERM: stopping",
        "shard 0 stopped",
    ):
        assert log.count(event) == 1, event


def test_start_after_start_is_another_incarnation(start: Start) -> None:
    former, later = (start().remote.register().incarnation for _ in range(2))
    assert former != later
    assert not is_older(later, former)


# What it refuses to start with


def test_port_in_use_is_refused_in_one_line_at_once(start: Start, unchanged: Pserver) -> None:
    pserver = start("--control", unchanged.endpoint)
    assert pserver.wait(END_S) == 1
    (line,) = pserver.log.read_text().splitlines()
    assert line.startswith("pserver 0: SettingError: control plane: ")
    assert unchanged.endpoint in line


def wait_for_line(pserver: Pserver, text: str) -> None:
    deadline = time.monotonic() + END_S
    while text not in pserver.log.read_text():
        assert time.monotonic() < deadline, pserver.log.read_text()
        assert pserver.process.poll() is None, pserver.log.read_text()
        time.sleep(0.05)


def test_restarted_pserver_waits_until_its_port_is_free(start: Start) -> None:
    other = start()
    assert other.remote.register(SGD).incarnation
    pserver = start("--is-restart", "--control", other.endpoint)
    wait_for_line(pserver, "cannot bind")
    other.terminate()
    wait_for_line(pserver, "is ready")


def test_restarted_pserver_waits_until_its_log_is_there(start: Start, tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    pserver = start("--is-restart", "--log-job-id", "a job", FLEET_SPARSE_DURABILITY="log")
    wait_for_line(pserver, "FLEET_SPARSE_LOG: ")
    (tmp_path / "log").unlink()
    wait_for_line(pserver, "is ready")


def test_restarted_pserver_waits_until_its_snapshot_is_there(start: Start, tmp_path: Path) -> None:
    before = start()
    client = before.remote.register(SGD)
    assert client.incarnation
    save("model", before.remote)
    before.terminate()
    (tmp_path / "model").rename(tmp_path / "away")
    pserver = start("--is-restart", "--recover", "model/000001-full")
    wait_for_line(pserver, "tries again")
    (tmp_path / "away").rename(tmp_path / "model")
    wait_for_line(pserver, "is ready")


def test_restarted_pserver_ends_with_1_after_the_failover_time(start: Start, unchanged: Pserver) -> None:
    pserver = start("--is-restart", "--control", unchanged.endpoint, FLEET_SPARSE_FAILOVER_S="0.1")
    assert pserver.wait(END_S) == 1


def test_first_start_without_its_log_ends_with_1_at_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    pserver = start("--supervised", FLEET_SPARSE_DURABILITY="log")
    assert pserver.wait(END_S) == 1
    assert "SettingError: FLEET_SPARSE_LOG: " in pserver.log.read_text()
    assert "is started again" not in pserver.log.read_text()


def test_pserver_that_cannot_continue_is_not_started_again(start: Start) -> None:
    pserver = start("--supervised", FLEET_SPARSE_DURABILITY="none")
    pserver.remote.register(SGD)
    os.kill(pid_of(pserver), signal.SIGKILL)
    assert pserver.wait(END_S) == -signal.SIGKILL


REFUSED_STARTS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((), {"shard": 1}, "SettingError: shard 1:"),
    ((), {"FLEET_SPARSE_LOG_LEVEL": "loud"}, "SettingError: FLEET_SPARSE_LOG_LEVEL:"),
    (("--load", "nothing"), {}, "SnapshotError: "),
]


@pytest.mark.parametrize(("arguments", "options", "error"), REFUSED_STARTS, ids=[error for *_, error in REFUSED_STARTS])
def test_wrong_start_ends_with_one_line(
    start: Start, arguments: tuple[str, ...], options: dict[str, Any], error: str
) -> None:
    pserver = start(*arguments, **options)
    assert pserver.wait(END_S) == 1
    assert error in pserver.log.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("variables", "is_exposed", "kind"),
    [
        ({}, False, "unix:"),
        ({"FLEET_SPARSE_CHANNEL": "zmq"}, False, ""),
        ({}, True, "tcp:127.0.0.1:"),
        ({"FLEET_SPARSE_CHANNEL": "zmq"}, True, ""),
        ({"FLEET_SPARSE_CHANNEL": "stream"}, True, "tcp:127.0.0.1:"),
    ],
)
def test_pserver_listens_for_streams_or_for_zeromq(
    start: Start, variables: dict[str, str], is_exposed: bool, kind: str
) -> None:
    others = ("--servers", "127.0.0.1:0,203.0.113.77:0") if is_exposed else ()
    pserver = start(*others, num_shards=1 + is_exposed, FLEET_SPARSE_INSECURE="1", **variables)
    remote = RemotePserver(pserver.endpoint, "auto" if kind else "zmq")
    shard = remote.register(SGD)
    remote.close()
    assert shard.stream_endpoint.startswith(kind)
    assert (bool(shard.stream_endpoint), bool(shard.zmq_endpoint)) == (bool(kind), not kind)
    assert ("FLEET_SPARSE_INSECURE" in pserver.log.read_text()) is is_exposed


ANOTHER_USER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
port, control, data = sys.argv[1:]
for family, address in (
    (socket.AF_INET, ("127.0.0.1", int(port))),
    (socket.AF_UNIX, control),
    (socket.AF_UNIX, "\\0" + data),
):
    with socket.socket(family) as stream:
        stream.settimeout(20)
        try:
            stream.connect(address)
            print("ended" if stream.recv(1) == b"" else "served")
        except OSError as error:
            print(type(error).__name__)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_is_not_served(start: Start) -> None:
    pserver = start()
    shard = pserver.remote.register(SGD)
    address = Address.parse(pserver.endpoint)
    names = str(address.port), str(socket_path(address.port)), shard.stream_endpoint.removeprefix("unix:")
    command = [sys.executable, "-c", ANOTHER_USER, *names]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert found == ["ConnectionRefusedError", "PermissionError", "ended"]
    assert pserver.remote.register(SGD).incarnation == shard.incarnation


# Supervised pservers


def pid_of(pserver: Pserver) -> int:
    """The newest process of a supervised pserver."""
    return int(re.findall(r"starts: pid (\d+)", pserver.log.read_text())[-1])


FAILOVER = Settings(deadline_s=5.0, retry_s=0.1, failover_s=60.0)
IDS, _ = Deduplicator(Placement.even(1)).unique([np.array([7])], SGD.salt)


@pytest.mark.parametrize("channel", ["stream", "zmq"])
def test_client_continues_with_a_restarted_pserver(start: Start, channel: Channel) -> None:
    pserver = start("--supervised", FLEET_SPARSE_CHANNEL=channel)
    settings = replace(FAILOVER, channel=channel)
    with connected([pserver.endpoint], [SGD], settings, mode=Mode()) as (control, client):
        rows = np.empty((1, SGD.dim), np.float32)
        for num_pushes in range(1, 7):
            client.push([RowBatch(SGD, IDS, np.ones((1, SGD.dim), np.float32), 1.0, 1)])
            client.pull([RowBatch(SGD, IDS, rows)])
            assert rows[0, 0] == 0.5 - num_pushes
            if num_pushes == 3:
                save_alone(control, "model")
                os.kill(pid_of(pserver), signal.SIGKILL)
        assert pserver.process.poll() is None
    pserver.terminate()
    assert pserver.wait() == 0


def test_save_under_way_fails_when_a_pserver_dies(start: Start, tmp_path: Path) -> None:
    pserver = start("--supervised")
    with connected([pserver.endpoint], [SGD], FAILOVER, mode=Mode()) as (control, client):
        batch = RowBatch(SGD, IDS, np.ones((1, SGD.dim), np.float32), 1.0, 1)
        client.push([batch])
        under_way = Save(control, "model")
        under_way.begin(Progress(0, ""))
        os.kill(pid_of(pserver), signal.SIGKILL)
        with pytest.raises(SnapshotError):
            under_way.finish()
        client.push([batch])
        client.flush()
        assert save_alone(control, "model") == str(tmp_path / "model" / "000001-full")


@pytest.mark.guarantee("A8")
def test_restarted_pserver_has_a_snapshot_without_its_end(start: Start) -> None:
    pserver = start("--supervised")
    client = FrameClient(pserver.remote.register(SGD))
    assert client.push(push(SGD, ids_of(7), floats([1, 1]))).error is None
    save_without_an_end("model", pserver.remote)
    os.kill(pid_of(pserver), signal.SIGKILL)
    wait_for_line(pserver, "loaded 1 rows of snapshot 000001-full")


@pytest.mark.guarantee("A6")
def test_new_process_joins_the_job_of_a_worker_that_goes_on(start: Start) -> None:
    pserver = start("--supervised")
    job_id = pserver.remote.call(registration(SGD, worker=0, num_workers=2)).job_id
    pserver.remote.call(registration(SGD, worker=1, num_workers=2))
    os.kill(pid_of(pserver), signal.SIGKILL)
    wait_until_ready_again(pserver)
    again = RemotePserver(pserver.endpoint)
    started_again = again.start_call(registration(SGD, worker=1, num_workers=2, client_id=b"new" + bytes(13)))
    rejoining = registration(SGD, worker=0, num_workers=2)
    rejoining.job_id = job_id
    rejoining.resumption.SetInParent()
    assert (again.call(rejoining).job_id, started_again.result().job_id) == (job_id, job_id)
    again.close()


def wait_until_ready_again(pserver: Pserver) -> None:
    deadline = time.monotonic() + END_S
    while pserver.log.read_text().count("is ready") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_supervisor_takes_little_memory(start: Start) -> None:
    pserver = start("--supervised")
    assert pserver.remote.register(SGD).incarnation
    status = Path(f"/proc/{pserver.process.pid}/status").read_text()
    assert int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) < 25 << 10


@pytest.mark.parametrize("has_standby", ["0", "1"])
def test_restarted_pserver_has_its_address_and_is_a_later_one(start: Start, has_standby: str) -> None:
    pserver = start("--supervised", FLEET_SPARSE_STANDBY=has_standby)
    before = pserver.remote.register(SGD).incarnation
    pid = pid_of(pserver)
    os.kill(pid, signal.SIGKILL)
    wait_until_ready_again(pserver)
    again = RemotePserver(pserver.endpoint)
    assert again.register(SGD).incarnation >> 32 > before >> 32
    again.close()
    assert pid_of(pserver) != pid


def test_a_standby_takes_the_place_of_a_killed_pserver(start: Start) -> None:
    pserver = start("--supervised", FLEET_SPARSE_DURABILITY="log")
    with connected([pserver.endpoint], [SGD], FAILOVER, mode=Mode()) as (_, client):
        rows = np.empty((1, SGD.dim), np.float32)
        for num_pushes in (1, 2, 3):
            client.push([RowBatch(SGD, IDS, np.ones((1, SGD.dim), np.float32), 1.0, 1)])
            client.pull([RowBatch(SGD, IDS, rows)])
            assert rows[0, 0] == 0.5 - num_pushes
            standby, before = standby_of(pserver), pid_of(pserver)
            os.kill(before, signal.SIGKILL)
            client.pull([RowBatch(SGD, IDS, rows)])
            assert pid_of(pserver) == standby
    pserver.terminate()
    assert pserver.wait() == 0


def standby_of(pserver: Pserver) -> int:
    """The process that waits beside the newest one of a supervised pserver, once there is one."""
    children = Path(f"/proc/{pserver.process.pid}/task/{pserver.process.pid}/children")
    deadline = time.monotonic() + END_S
    while not (found := {int(pid) for pid in children.read_text().split()} - {pid_of(pserver)}):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (pid,) = found
    return pid


def test_a_standby_that_fails_may_be_started_again() -> None:
    """It may have become the pserver when it fails."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        variables = {LIFELINE: str(theirs.fileno()), "FLEET_SPARSE_RESTARTS": "none"}
        command = [sys.executable, "-m", "fleet_sparse.pserver", STANDBY]
        ended = subprocess.run(
            command,
            pass_fds=[theirs.fileno()],
            env=child_environment(**variables),
            check=False,
            capture_output=True,
            timeout=END_S,
        )
    assert ended.returncode == TRY_AGAIN


def test_a_standby_without_a_supervisor_ends_with_1() -> None:
    command = [sys.executable, "-m", "fleet_sparse.pserver", STANDBY]
    assert subprocess.run(command, env=child_environment(), check=False, timeout=END_S).returncode == 1


def test_a_pserver_says_that_it_ends_in_order(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        variables = {LIFELINE: str(theirs.fileno()), "FLEET_SPARSE_ROOT": str(tmp_path)}
        command = [sys.executable, "-m", "fleet_sparse.pserver", "--shard", "0", "--num-shards", "1"]
        command += ["--control", "127.0.0.1:0"]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=child_environment(**variables)) as process:
            theirs.close()
            lines = ours.makefile()
            while next(lines) != "alive\n":
                pass
            process.terminate()
            assert list(lines)[-1] == "ending\n"
        assert process.returncode == 0


def test_supervised_pserver_that_refuses_its_options_ends_with_1(start: Start) -> None:
    assert start("--supervised", shard=3).wait() == 1
