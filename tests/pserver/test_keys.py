"""Pserver processes with keys, which other machines may reach."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import Forbidden, SettingError, ShardUnavailable
from fleet_sparse.keys import TRAINER, read_keys
from fleet_sparse.local_pservers import PserverProcess, local_pservers
from fleet_sparse.net_addresses import Address
from fleet_sparse.serving.pserver_reader import PserverReader
from fleet_sparse.settings import ClientRights, Settings
from fleet_sparse.wire.control import ClientRole
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.shard_link import ClientIdentity
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support import saves
from support.job_keys import make_keys
from support.pserver_job import connected
from support.shards import CLUSTER, SGD

ELSEWHERE = ("--servers", "127.0.0.1:0,203.0.113.77:0")
"""One of the pservers is on another machine, so that all listen on TCP."""
IMPATIENT = Settings(connect_s=2.0, deadline_s=2.0)


def pserver(directory: Path, shard: int, *arguments: str, **variables: str) -> PserverProcess:
    environment = {"FLEET_SPARSE_ROOT": str(directory), **variables}
    log = directory / f"pserver-{shard}.log"
    return PserverProcess(
        shard, 2, *ELSEWHERE, *arguments, cluster_id=CLUSTER, directory=directory, environment=environment, log=log
    )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def job(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PserverProcess]]:
    """Two pservers with keys."""
    directory = tmp_path_factory.mktemp("job")
    with ExitStack() as stack:
        processes = [pserver(directory, shard, FLEET_SPARSE_KEYS=str(keys)) for shard in range(2)]
        for process in processes:
            stack.callback(process.kill)
        for process in processes:
            _ = process.endpoint
        yield processes


def endpoints(job: Sequence[PserverProcess]) -> list[str]:
    return [process.endpoint for process in job]


def log_of(process: PserverProcess) -> str:
    assert isinstance(process.log, Path)
    return process.log.read_text()


def test_a_job_trains_over_tls(job: list[PserverProcess], keys: Path) -> None:
    ids, _ = Deduplicator(Placement.even(2)).unique([np.arange(20_000)], SGD.salt)
    with connected(endpoints(job), [SGD], Settings(keys=str(keys)), mode=Mode()) as (control, client):
        rows = np.empty((20_000, SGD.dim), np.float32)
        for num_pushes in range(1, 4):
            client.push([RowBatch(SGD, ids, np.ones_like(rows), 1.0, 1)])
            client.pull([RowBatch(SGD, ids, rows)])
            assert (rows == 0.5 - num_pushes).all()
        assert sum(table.num_rows for reply in control.stats() for table in reply.tables) == 20_000


def test_with_keys_the_log_says_their_authority(job: list[PserverProcess], keys: Path) -> None:
    authority = read_keys(str(keys), TRAINER).authority
    for process in job:
        assert authority in log_of(process)
        assert "FLEET_SPARSE_INSECURE" not in log_of(process)
        assert re.search(r"data plane tcp:127\.0\.0\.1:\d+", log_of(process))


def test_a_worker_of_another_authority_is_told_both(job: list[PserverProcess], keys: Path, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other")
    ours, theirs = (read_keys(str(each), TRAINER).authority for each in (other, keys))
    settings = Settings(keys=str(other))
    with ControlClient(endpoints(job), settings) as control, pytest.raises(SettingError, match=f"{theirs}.*{ours}"):
        control.register([SGD], 0, 1)


def test_a_worker_without_keys_is_told(job: list[PserverProcess]) -> None:
    with ControlClient(endpoints(job), Settings()) as control, pytest.raises(SettingError, match="FLEET_SPARSE_KEYS"):
        control.register([SGD], 0, 1)


def test_a_certificate_of_a_pserver_makes_no_calls(job: list[PserverProcess], keys: Path) -> None:
    credentials = Credentials(read_keys(str(keys), "pserver"))
    with ControlClient(endpoints(job), IMPATIENT, credentials) as control, pytest.raises(ShardUnavailable):
        control.register([SGD], 0, 1)


def test_nobody_else_can_be_the_pserver(keys: Path) -> None:
    """A trainer's certificate is no pserver's, although the same authority signed it."""
    server = grpc.server(ThreadPoolExecutor(1))
    own = read_keys(str(keys), TRAINER)
    credentials = grpc.ssl_server_credentials([(own.key_pem, own.certificate_pem)], own.authority_pem, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    settings = replace(IMPATIENT, keys=str(keys))
    with ControlClient([f"127.0.0.1:{port}"], settings) as control, pytest.raises(ShardUnavailable):
        control.register([SGD], 0, 1)
    server.stop(0)


def test_a_worker_with_keys_says_that_the_pserver_has_none(keys: Path, tmp_path: Path) -> None:
    process = pserver(tmp_path, 0, FLEET_SPARSE_INSECURE="1")
    try:
        settings = Settings(keys=str(keys))
        with ControlClient([process.endpoint], settings) as control, pytest.raises(SettingError, match="no keys"):
            control.register([SGD], 0, 1)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "FLEET_SPARSE_KEYS"),
        ({"FLEET_SPARSE_KEYS": "missing"}, "missing/ca.pem"),
        ({"FLEET_SPARSE_KEYS": "{keys}", "FLEET_SPARSE_INSECURE": "1"}, "FLEET_SPARSE_INSECURE"),
        ({"FLEET_SPARSE_KEYS": "{keys}", "FLEET_SPARSE_CHANNEL": "zmq"}, "FLEET_SPARSE_CHANNEL"),
    ],
)
def test_a_pserver_that_may_not_start_says_so_and_ends(
    keys: Path, tmp_path: Path, variables: dict[str, str], named: str
) -> None:
    process = pserver(tmp_path, 0, **{name: value.format(keys=keys) for name, value in variables.items()})
    try:
        assert process.wait(60.0) == 1
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert named in log_of(process).splitlines()[-1]


def test_on_one_host_keys_protect_the_control_plane(keys: Path, tmp_path: Path) -> None:
    ids, _ = Deduplicator(Placement.even(1)).unique([np.arange(100)], SGD.salt)
    with local_pservers(1, root=tmp_path, environment={"FLEET_SPARSE_KEYS": str(keys)}) as pservers:
        with connected(pservers.endpoints, [SGD], Settings(keys=str(keys)), mode=Mode()) as (_, client):
            rows = np.empty((100, SGD.dim), np.float32)
            client.pull([RowBatch(SGD, ids, rows)])
            assert (rows == 0.5).all()
        with ControlClient(pservers.endpoints, IMPATIENT) as control, pytest.raises(SettingError):
            control.stats()


# Roles


def as_role(keys: Path, role: ClientRights) -> Settings:
    return Settings(keys=str(keys), role=role)


def what_is_forbidden(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(Forbidden) as caught:
        call()
    return caught.value.role, caught.value.what


def test_a_reader_registers_as_one_and_asks_for_stats(job: list[PserverProcess], keys: Path) -> None:
    with ControlClient(endpoints(job), as_role(keys, "reader")) as control:
        assert len(control.visit(ClientRole.READER)) == 2
        assert len(control.stats()) == 2


@pytest.mark.parametrize("role", ["reader", "watcher"])
def test_a_reader_neither_trains_nor_stops_nor_shrinks(
    job: list[PserverProcess], keys: Path, role: ClientRights
) -> None:
    with ControlClient(endpoints(job), as_role(keys, role)) as control:
        registers = "Register as a worker" if role == "reader" else "Register"
        assert what_is_forbidden(lambda: control.register([SGD], 0, 1)) == (role, registers)
        assert what_is_forbidden(control.stop) == (role, "Stop")
        assert what_is_forbidden(lambda: control.snapshots.shrink([Criterion("min_norm", 9.0)])) == (role, "Shrink")
    assert all(process.process.poll() is None for process in job)


def test_a_watcher_asks_for_stats_alone(job: list[PserverProcess], keys: Path) -> None:
    with ControlClient(endpoints(job), as_role(keys, "watcher")) as control:
        assert len(control.stats()) == 2
        assert what_is_forbidden(lambda: control.visit(ClientRole.TOOL)) == ("watcher", "Register")


@contextmanager
def closed_forbidden(client: Client) -> Iterator[Client]:
    """Closes a client with pushes to several shards, of which each is refused."""
    yield client
    with suppress(Forbidden):
        client.close()


@pytest.mark.parametrize(("role", "pulls"), [("reader", True), ("watcher", False)])
def test_a_role_is_refused_on_the_data_plane(
    job: list[PserverProcess], keys: Path, role: ClientRights, pulls: bool
) -> None:
    """Also if it knows the client id of a worker."""
    ids, _ = Deduplicator(Placement.even(2)).unique([np.arange(100)], SGD.salt)
    rows = np.empty((100, SGD.dim), np.float32)
    settings = replace(IMPATIENT, keys=str(keys))
    with ControlClient(endpoints(job), settings) as control:
        registrations = control.register([SGD], 0, 1, Mode())
        credentials = Credentials.of(as_role(keys, role))
        channel = open_channel(registrations, settings, credentials)
        with closed_forbidden(Client(channel, control.identity, registrations, Placement.even(2), settings)) as client:
            if pulls:
                client.pull([RowBatch(SGD, ids, rows)])
                before = rows.copy()
            else:
                assert what_is_forbidden(lambda: client.pull([RowBatch(SGD, ids, rows)])) == (role, "PULL")

            def push() -> None:
                client.push([RowBatch(SGD, ids, np.ones_like(rows), 1.0, 1)])
                client.flush()

            assert what_is_forbidden(push) == (role, "PUSH")
        if pulls:
            channel = open_channel(registrations, settings, control.credentials)
            with Client(channel, control.identity, registrations, Placement.even(2), settings) as trainer:
                trainer.pull([RowBatch(SGD, ids, rows)])
            assert (rows == before).all()


def test_a_client_id_that_did_not_register_is_refused(job: list[PserverProcess], keys: Path) -> None:
    ids, _ = Deduplicator(Placement.even(2)).unique([np.arange(100)], SGD.salt)
    rows = np.empty((100, SGD.dim), np.float32)
    settings = replace(IMPATIENT, keys=str(keys))
    with ControlClient(endpoints(job), settings) as control:
        registrations = control.register([SGD], 0, 1, Mode())
        channel = open_channel(registrations, settings, control.credentials)
        stranger = ClientIdentity(b"s" * 16, 1)
        with Client(channel, stranger, registrations, Placement.even(2), settings) as client:
            found = what_is_forbidden(lambda: client.pull([RowBatch(SGD, ids, rows)]))
    assert found == ("unregistered", "PULL")


def test_handshakes_that_fail_do_not_fill_the_log(job: list[PserverProcess]) -> None:
    num_lines = log_of(job[0]).count("\n")
    streams = re.findall(r"data plane tcp:(\S+)", log_of(job[0]))
    for endpoint in (job[0].endpoint, *streams):
        for _ in range(100):
            with socket.create_connection(Address.parse(endpoint), 20.0) as stream:
                stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert log_of(job[0]).count("\n") - num_lines < 20


def test_server_names_of_strangers_are_not_in_the_log(job: list[PserverProcess], keys: Path) -> None:
    context = read_keys(str(keys), TRAINER).client_context()
    with socket.create_connection(Address.parse(job[0].endpoint), 20.0) as stream, suppress(OSError):
        context.wrap_socket(stream, server_hostname="strange.name")
    with ControlClient(endpoints(job), Settings(keys=str(keys))) as control:
        assert len(control.stats()) == 2
    assert "strange.name" not in log_of(job[0])


def test_the_log_counts_refusals(job: list[PserverProcess], keys: Path) -> None:
    num_lines = log_of(job[0]).count("\n")
    with ControlClient(endpoints(job), as_role(keys, "watcher")) as control:
        for _ in range(200):
            what_is_forbidden(control.stop)
    assert log_of(job[0]).count("\n") - num_lines < 20


def test_a_reader_reads_from_a_read_only_pserver(keys: Path, tmp_path: Path) -> None:
    shards = saves.trained(2)
    saves.save(shards, tmp_path)
    with ExitStack() as stack:
        variables = {"FLEET_SPARSE_KEYS": str(keys)}
        processes = [pserver(tmp_path, shard, "--read-only", "--load", ".", **variables) for shard in range(2)]
        for process in processes:
            stack.callback(process.kill)
        for role in ("reader", "trainer"):
            reader = stack.enter_context(PserverReader(endpoints(processes), as_role(keys, role)))
            name = next(iter(reader.tables))
            assert reader.read({name: np.arange(8)}).rows[name].shape == (8, reader.tables[name].dim)
