"""Pservers with keys on two hosts, which are network namespaces: nobody but a trainer sends a frame to a shard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.keys import READER, TRAINER, WATCHER, read_keys
from fleet_sparse.local_pservers import child_environment
from fleet_sparse.pserver.permissions import CALLS, may_ask
from fleet_sparse.wire.control import METHODS
from fleet_sparse.wire.frame_format import Op
from support import other_host
from support.job_keys import make_keys

HOSTS = ("10.213.77.1", "10.213.77.2")
START_S = 60.0


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Names of two network namespaces that reach each other."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces: need root and `ip` of iproute2")
    names = [f"fleet-sparse-{os.getpid()}-{number}" for number in range(2)]
    with ExitStack() as stack:
        for name in names:
            try:
                run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces: `ip netns add` is refused here: {error.stderr.decode().strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        links = [f"fs{os.getpid()}-{number}" for number in range(2)]
        run("ip", "link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1])
        for name, link, address in zip(names, links, HOSTS, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/30", "dev", link)
            for each in (link, "lo"):
                run("ip", "-n", name, "link", "set", each, "up")
        yield names


@dataclass
class Job:
    """Two pservers, each on a host."""

    hosts: list[str]
    directory: Path
    keys: Path
    expired: Path
    other: Path
    endpoints: list[str]
    trained: dict[str, Any]
    num_sent: int = 0
    """Frames that trainers sent to the first shard since."""

    def tries(self, name: str, **arguments: Any) -> Any:
        """Returns what a process on the second host finds."""
        return on_host(self.hosts[1], name, **arguments)


def on_host(host: str, name: str, **arguments: Any) -> Any:
    tests = str(Path(other_host.__file__).parents[1])
    environment = child_environment(PYTHONPATH=os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
    command = ["ip", "netns", "exec", host, sys.executable, other_host.__file__, name, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def start(host: str, shard: int, directory: Path, **variables: str) -> subprocess.Popen[bytes]:
    control = f"{HOSTS[shard]}:0"
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "fleet_sparse.pserver", "--control", control]
    command += ["--shard", str(shard), "--num-shards", "2", "--cluster-id", "77"]
    command += ["--servers", ",".join(f"{each}:0" for each in HOSTS)]
    command += ["--endpoint-file", str(directory / f"endpoint-{shard}")]
    environment = child_environment(FLEET_SPARSE_ROOT=str(directory), **variables)
    with (directory / f"pserver-{shard}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def job(hosts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that has trained a step; at the end, that no frame reached a shard besides those of `Job.num_sent`."""
    authority = pytest.importorskip("fleet_sparse.tools.authority", exc_type=ImportError)
    directory = tmp_path_factory.mktemp("job")
    signer = authority.new_authority()
    keys = make_keys(directory / "keys", signer=signer)
    expired = make_keys(directory / "expired", signer=signer, days=-1)
    other = make_keys(directory / "other")
    with ExitStack() as stack:
        for shard, host in enumerate(hosts):
            stack.callback(ended, start(host, shard, directory, FLEET_SPARSE_KEYS=str(keys)))
        files = [directory / f"endpoint-{shard}" for shard in range(2)]
        until = time.monotonic() + START_S
        while not all(file.exists() for file in files):
            assert time.monotonic() < until, (directory / "pserver-0.log").read_text()
            time.sleep(0.05)
        made = Job(hosts, directory, keys, expired, other, [file.read_text().strip() for file in files], {})
        made.trained = made.tries("train", endpoints=made.endpoints, keys=str(keys))
        first, second = num_requests(made)
        assert min(first, second) > 0
        yield made
        assert num_requests(made) == [first + made.num_sent, second], "no other frame reached a shard"


def num_requests(job: Job) -> Any:
    return job.tries("num_requests", endpoints=job.endpoints, keys=str(job.keys))


def test_trainer_of_another_host_trains(job: Job) -> None:
    assert job.trained["rows"] == [-0.5, -0.5]
    assert job.trained["stream"].startswith(f"tcp:{HOSTS[0]}:")


def test_one_of_the_pservers_is_reached_from_its_own_host(job: Job) -> None:
    for shard, host in enumerate(job.hosts):
        one = on_host(host, "num_requests", endpoints=[job.endpoints[shard]], keys=str(job.keys))
        assert one == [num_requests(job)[shard]]


def test_worker_without_keys_is_told_to_set_them(job: Job) -> None:
    name, message = job.tries("register", endpoints=job.endpoints, keys="")
    assert (name, "FLEET_SPARSE_KEYS" in message) == ("SettingError", True)


def test_worker_of_another_authority_is_told_both(job: Job) -> None:
    name, message = job.tries("register", endpoints=job.endpoints, keys=str(job.other))
    authorities = [read_keys(str(each), TRAINER).authority for each in (job.keys, job.other)]
    assert (name, [each in message for each in authorities]) == ("SettingError", [True, True])


def test_worker_with_expired_keys_is_told_the_file(job: Job) -> None:
    name, message = job.tries("register", endpoints=job.endpoints, keys=str(job.expired))
    assert (name, str(job.expired / "trainer.pem") in message) == ("SettingError", True)


def test_worker_whose_key_others_can_read_is_told_the_file(job: Job, tmp_path: Path) -> None:
    open_keys = tmp_path / "open"
    shutil.copytree(job.keys, open_keys)
    (open_keys / "trainer.pem").chmod(0o644)
    name, message = job.tries("register", endpoints=job.endpoints, keys=str(open_keys))
    assert (name, str(open_keys / "trainer.pem") in message) == ("SettingError", True)


@pytest.mark.parametrize("fault", ["open", "expired", "missing"])
def test_pserver_with_unusable_keys_names_the_file(job: Job, tmp_path: Path, fault: str) -> None:
    keys = tmp_path / "keys"
    shutil.copytree(job.expired if fault == "expired" else job.keys, keys)
    if fault == "open":
        (keys / "pserver.pem").chmod(0o640)
    if fault == "missing":
        (keys / "pserver.pem").unlink()
    process = start(job.hosts[0], 0, tmp_path, FLEET_SPARSE_KEYS=str(keys))
    try:
        assert process.wait(START_S) == 1
    finally:
        ended(process)
    assert str(keys / "pserver.pem") in (tmp_path / "pserver-0.log").read_text().splitlines()[-1]


@pytest.mark.parametrize("role", [READER, WATCHER])
def test_role_is_refused_every_call_that_is_not_its_own(job: Job, role: str) -> None:
    answers = job.tries("calls", endpoints=job.endpoints, keys=str(job.keys), role=role)
    assert set(answers) == set(METHODS)
    refused = {method: message for method, (name, message) in answers.items() if name == "Forbidden"}
    assert set(refused) == set(METHODS) - (CALLS[role] - {"Register"}), "the Register is that of no reader or tool"
    assert [method for method, message in refused.items() if role not in message] == []


@pytest.mark.parametrize("role", [READER, WATCHER])
def test_role_is_refused_every_op_that_is_not_its_own(job: Job, role: str) -> None:
    asked = {op.name for op in set(Op) - other_host.REPLIES if not may_ask(role, op)}
    assert "PUSH" in asked
    answers = job.tries("ops", job=job.trained, keys=str(job.keys), role=role, names=sorted(asked))
    assert answers == {name: ["FORBIDDEN", f"{role} {name}"] for name in asked}


def test_connections_without_a_valid_certificate_are_ended(job: Job) -> None:
    files = {"another authority": job.other, "expired": job.expired}
    certificates = {name: str(directory / "trainer.pem") for name, directory in files.items()}
    certificates["pserver"] = str(job.keys / "pserver.pem")
    addresses = [job.trained["stream"].removeprefix("tcp:")]
    answers = job.tries("connections", addresses=addresses, certificates=certificates)
    assert answers == {name: [0] for name in ("plain TCP", "no certificate", *certificates)}


def test_tls_1_2_reaches_no_shard(job: Job) -> None:
    address = job.trained["stream"].removeprefix("tcp:")
    assert job.tries("tls_1_2", address=address, certificate=str(job.keys / "trainer.pem")) == 0


def test_session_that_is_played_again_reaches_no_shard(job: Job) -> None:
    job.num_sent += 1
    assert job.tries("replay", job=job.trained, keys=str(job.keys)) >= 0
