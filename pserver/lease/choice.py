"""Which coordinator a job has."""

from __future__ import annotations

from pathlib import Path

from fleet_sparse.errors import SettingError

from .coordinator import VARIABLE, Coordinator
from .directory import DirectoryCoordinator
from .record import RecordCoordinator

_MAX_CALL_S = 10.0
_CALLS_PER_TTL = 4


def open_coordinator(url: str, directory: Path, job: str, *, ttl_s: float) -> Coordinator:
    """Connects to the coordinator of a job.

    Args:
        url: As `Settings.coordinator`.
        directory: Directory of leases, used if `url` is empty.
        job: Identity of the job.
        ttl_s: As of `Coordinator.lease`.

    Raises:
        SettingError: The URL is wrong, or its client library is not installed.
        OSError: The coordinator cannot be reached.
    """
    if not url:
        return DirectoryCoordinator(directory, job)
    scheme, separator, rest = url.partition("://")
    hosts, _, path = rest.partition("/")
    path, timeout_s = path.strip("/"), min(ttl_s / _CALLS_PER_TTL, _MAX_CALL_S)
    if not separator or not hosts or not path or scheme not in ("zookeeper", "etcd"):
        raise SettingError(
            f"{VARIABLE}: is {url!r}, should be zookeeper://host:port/path or etcd://host:port/prefix. Leave it out "
            "for the directory of the log"
        )
    try:
        if scheme == "zookeeper":
            from .zookeeper import open_zookeeper

            return RecordCoordinator(open_zookeeper(hosts, path, timeout_s), url, job)
        from .etcd import open_etcd

        return RecordCoordinator(open_etcd(hosts, path, timeout_s), url, job)
    except ImportError as error:
        raise SettingError(
            f"{VARIABLE}: is {url!r}, which needs a client library: {error}. pip install 'fleet-sparse[{scheme}]'"
        ) from error
