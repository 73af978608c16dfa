"""What every coordinator promises: the directory, and real servers of ZooKeeper and etcd."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fleet_sparse.errors import LeaseLost
from fleet_sparse.local_pservers import child_environment
from fleet_sparse.pserver.lease.choice import open_coordinator
from fleet_sparse.pserver.lease.coordinator import Coordinator, Holder
from fleet_sparse.pserver.lease.lease import Lease, take_lease
from support.lease_servers import etcd, zookeeper

SHARD, OTHER = "shard-0-of-2", "shard-1-of-2"
LONG_S, SHORT_S = 60.0, 0.5
Connect = Callable[..., Coordinator]


@pytest.fixture(scope="module", params=["directory", "zookeeper", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "directory":
        yield ""
    elif request.param == "zookeeper":
        with zookeeper(directory / "data") as endpoint:
            yield f"zookeeper://{endpoint}"
    else:
        with etcd(directory / "data") as endpoint:
            yield f"etcd://{endpoint}"


@pytest.fixture
def connect(url: str, tmp_path: Path) -> Iterator[Connect]:
    """Connects a process of a job; all see the same leases, which no other test sees."""
    with ExitStack() as stack:

        def connect(job: str = "a job") -> Coordinator:
            path = f"{url}/{tmp_path.name}" if url else ""
            coordinator = open_coordinator(path, tmp_path / "leases", job, ttl_s=LONG_S)
            stack.callback(coordinator.close)
            return coordinator

        yield connect


@pytest.mark.guarantee("W11")
def test_a_lease_has_one_holder_at_a_time(connect: Connect) -> None:
    one, two = connect(), connect()
    assert one.lease(SHARD, LONG_S) == 1
    found = two.lease(SHARD, LONG_S)
    assert isinstance(found, Holder)
    assert (found.generation, found.job, found.ttl_s) == (1, "a job", LONG_S)


def test_a_released_lease_is_free_at_once(connect: Connect) -> None:
    one, two = connect(), connect()
    assert one.lease(SHARD, LONG_S) == 1
    one.release(SHARD)
    two.watch(SHARD, LONG_S)
    assert two.lease(SHARD, LONG_S) == 2


def test_generations_grow_and_pass_the_one_that_is_named(connect: Connect) -> None:
    coordinator, generations = connect(), []
    for after in (0, 0, 9, 3):
        generations.append(coordinator.lease(SHARD, LONG_S, after=after))
        coordinator.release(SHARD)
    assert generations == [1, 2, 10, 11]


def test_shards_have_leases_of_their_own(connect: Connect) -> None:
    one, two = connect(), connect()
    assert (one.lease(SHARD, LONG_S), two.lease(OTHER, LONG_S)) == (1, 1)
    assert one.renew(SHARD)
    assert two.renew(OTHER)


@pytest.mark.guarantee("W11")
def test_a_lease_that_is_not_renewed_passes_to_another(connect: Connect) -> None:
    one, two = connect(), connect()
    begun_at = time.monotonic()
    assert one.lease(SHARD, SHORT_S) == 1
    while isinstance(generation := two.lease(SHARD, SHORT_S), Holder):
        two.watch(SHARD, SHORT_S)
    assert generation == 2
    assert time.monotonic() - begun_at > SHORT_S
    assert not one.renew(SHARD)
    assert two.renew(SHARD)


def test_a_lease_of_another_job_that_is_not_renewed_passes_on(connect: Connect) -> None:
    one, two = connect("another job"), connect()
    assert one.lease(SHARD, SHORT_S) == 1
    lease = take_lease(two, SHARD, SHORT_S, job="a job")
    assert lease.generation == 2
    lease.release()


TAKES = """
import sys
from pathlib import Path
from fleet_sparse.pserver.lease.choice import open_coordinator
coordinator = open_coordinator(sys.argv[1], Path(sys.argv[2]), "a job", ttl_s=float(sys.argv[4]))
print(coordinator.lease(sys.argv[3], float(sys.argv[4])), flush=True)
sys.stdin.read()
"""


def test_a_lease_of_a_dead_process_of_this_machine_is_free(connect: Connect, url: str, tmp_path: Path) -> None:
    coordinator, path = connect(), f"{url}/{tmp_path.name}" if url else ""
    command = [sys.executable, "-c", TAKES, path, str(tmp_path / "leases"), SHARD, str(LONG_S)]
    with subprocess.Popen(
        command, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        assert isinstance(coordinator.lease(SHARD, LONG_S), Holder)
        process.kill()
    assert coordinator.lease(SHARD, LONG_S) == 2


@pytest.mark.slow
def test_a_lease_that_is_renewed_stays(connect: Connect) -> None:
    one, two = connect(), connect()
    lease = take_lease(one, SHARD, 5.0, job="a job")  # renewed by its thread, four times in this time
    until = time.monotonic() + 7.0
    while time.monotonic() < until:
        assert isinstance(two.lease(SHARD, 5.0), Holder)
        two.watch(SHARD, 1.0)
    lease.check()
    lease.release()


def test_one_of_many_takes_a_free_lease(connect: Connect) -> None:
    found: list[int | Holder] = []
    coordinators = [connect() for _ in range(8)]
    threads = [
        threading.Thread(target=lambda each=each: found.append(each.lease(SHARD, LONG_S))) for each in coordinators
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each for each in found if not isinstance(each, Holder)] == [1]
    assert len(found) == 8


@pytest.mark.guarantee("W11")
def test_a_pserver_waits_for_the_lease_of_its_shard(connect: Connect) -> None:
    one, two = connect(), connect()
    former = take_lease(one, SHARD, LONG_S, job="a job")
    taken: list[Lease] = []
    thread = threading.Thread(target=lambda: taken.append(take_lease(two, SHARD, LONG_S, job="a job")))
    thread.start()
    assert not taken
    former.release()
    thread.join(30)
    assert [lease.generation for lease in taken] == [2]
    with pytest.raises(LeaseLost):
        former.check()
    taken[0].release()
