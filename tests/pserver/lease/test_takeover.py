"""Two pserver processes of one shard and one log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from fleet_sparse.local_pservers import PserverProcess
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Op
from support.pservers import RemotePserver, RemoteShard
from support.shards import CLUSTER, SGD, FrameClient, floats, ids_of, pull, push
from support.waits import wait_until

LEASE_S = "5"
READY_S = 60.0


@contextmanager
def started(directory: Path, name: str, *arguments: str, **variables: str) -> Iterator[PserverProcess]:
    """A pserver process with a log and a lease, perhaps one that waits."""
    environment = {"FLEET_SPARSE_ROOT": str(directory), "FLEET_SPARSE_DURABILITY": "log", "FLEET_SPARSE_JOB_ID": "a"}
    environment["FLEET_SPARSE_LEASE_S"] = LEASE_S
    pserver = PserverProcess(
        0,
        1,
        *arguments,
        cluster_id=CLUSTER,
        directory=directory,
        environment={**environment, **variables},
        log=directory / name,
    )
    try:
        yield pserver
    finally:
        pserver.kill()


def client_of(remote: RemotePserver) -> FrameClient[RemoteShard]:
    """Returns the client of all pushes, connected again; it continues behind those that are applied."""
    client = FrameClient(remote.register(SGD, job_id="a"))
    client.seq = client.ask(Op.PULL, pull(SGD, ids_of(1))).header.push_seq
    return client


def push_once(client: FrameClient[RemoteShard]) -> None:
    assert client.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).error is None


@pytest.mark.guarantee("W11")
@pytest.mark.guarantee("W12")
@pytest.mark.parametrize("channel", ["auto", pytest.param("zmq", marks=pytest.mark.slow)])
def test_a_suspended_pserver_that_goes_on_acks_nothing(tmp_path: Path, channel: str) -> None:
    variables = {"FLEET_SPARSE_CHANNEL": channel}
    with (
        started(tmp_path, "first.log", **variables) as first,
        closing(RemotePserver(first.endpoint, channel)) as remote,
    ):
        client = client_of(remote)
        for _ in range(5):
            push_once(client)
        with started(tmp_path, "second.log", **variables) as second:
            wait_until(lambda: "waits for the lease" in (tmp_path / "second.log").read_text())
            push_once(client)
            first.suspend()
            late = client.frame(Op.PUSH, push(SGD, ids_of(1), floats([1.0, 0.0])), push_seq=client.seq + 1)
            client.shard.socket.send_multipart(encode(late))
            with closing(RemotePserver(second.endpoint, channel)) as new_remote:
                new_client = client_of(new_remote)
                assert new_client.seq == 6
                assert new_client.shard.incarnation >> 32 == (client.shard.incarnation >> 32) + 1
                push_once(new_client)
                first.resume()
                assert first.wait() == 1
                assert "LeaseLost" in (tmp_path / "first.log").read_text()
                if channel == "auto":
                    with pytest.raises(ConnectionError):
                        client.shard.socket.recv_multipart()
                push_once(new_client)
                assert new_client.seq == 8
                assert new_client.rows(SGD, 1) == [[0.5 - 8, 0.5]]
        with (
            started(tmp_path, "third.log", **variables) as third,
            closing(RemotePserver(third.endpoint, channel)) as last,
        ):
            assert client_of(last).rows(SGD, 1) == [[0.5 - 8, 0.5]]


def test_a_killed_pserver_leaves_its_lease_at_once(tmp_path: Path) -> None:
    variables = {"FLEET_SPARSE_LEASE_S": "100000"}
    for generation in (1, 2, 3):
        with (
            started(tmp_path, "pserver.log", **variables) as pserver,
            closing(RemotePserver(pserver.endpoint)) as remote,
        ):
            client = client_of(remote)
            assert (client.seq, client.shard.incarnation >> 32) == (generation - 1, generation)
            push_once(client)
            pserver.kill()


def test_a_pserver_that_waits_ends_with_a_signal(tmp_path: Path) -> None:
    with started(tmp_path, "first.log") as first:
        _ = first.endpoint
        with started(tmp_path, "second.log") as second:
            wait_until(lambda: "waits for the lease" in (tmp_path / "second.log").read_text())
            second.terminate()
            assert second.wait() == 0
