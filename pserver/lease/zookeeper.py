"""Records of leases in ZooKeeper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .record import RecordStore


def open_zookeeper(hosts: str, path: str, timeout_s: float) -> RecordStore:
    """Connects to ZooKeeper.

    Args:
        hosts: `host:port` of its servers, separated by commas.
        path: Path below which there is a node for each shard; created if missing.
        timeout_s: Longest time of a call.

    Raises:
        OSError: No server can be reached.
        ImportError: The extra is not installed.
    """
    from kazoo.client import KazooClient
    from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError

    client = KazooClient(hosts=hosts)

    def call(begin: Callable[[], Any]) -> Any:
        try:
            return begin().get(timeout=timeout_s)
        except client.handler.timeout_exception as error:
            raise TimeoutError(f"no answer in {timeout_s:g} s") from error

    def node(shard: str) -> str:
        return f"/{path}/{shard}"

    def read(shard: str) -> tuple[bytes, int]:
        try:
            content, stat = call(lambda: client.get_async(node(shard)))
        except NoNodeError:
            return b"", 0
        except KazooException as error:
            raise ConnectionError(repr(error)) from error
        return content, stat.version + 1  # its versions begin with 0

    def write(shard: str, content: bytes, version: int) -> int:
        try:
            if version:
                stat = call(lambda: client.set_async(node(shard), content, version - 1))
                return int(stat.version) + 1
            call(lambda: client.ensure_path_async(f"/{path}"))
            call(lambda: client.create_async(node(shard), content))
            return 1
        except (BadVersionError, NodeExistsError, NoNodeError):
            return 0
        except KazooException as error:
            raise ConnectionError(repr(error)) from error

    def close() -> None:
        client.stop()
        client.close()

    try:
        client.start(timeout=timeout_s)
    except client.handler.timeout_exception as error:
        raise TimeoutError(f"no connection in {timeout_s:g} s") from error
    return RecordStore(read, write, close)
