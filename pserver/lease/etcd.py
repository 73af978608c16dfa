"""Records of leases in etcd."""

from __future__ import annotations

from base64 import b64encode

from fleet_sparse.net_addresses import Address

from .record import RecordStore


def open_etcd(host: str, prefix: str, timeout_s: float) -> RecordStore:
    """Connects to etcd, by its HTTP gateway.

    Args:
        host: `host:port` of a server.
        prefix: Prefix of the keys, one for each shard.
        timeout_s: Longest time of a call.

    Raises:
        SettingError: The host has no port.
        ImportError: The extra is not installed.
    """
    from etcd3gw.client import Etcd3Client
    from etcd3gw.exceptions import Etcd3Exception

    address = Address.parse(host)
    client = Etcd3Client(host=address.host, port=address.port, timeout=timeout_s)

    def key(shard: str) -> str:
        return f"{prefix}/{shard}"

    def read(shard: str) -> tuple[bytes, int]:
        try:
            found = client.get(key(shard), metadata=True)
        except Etcd3Exception as error:
            raise ConnectionError(error.detail_text or repr(error)) from error
        return (found[0][0], int(found[0][1]["mod_revision"])) if found else (b"", 0)

    def write(shard: str, content: bytes, version: int) -> int:
        name = b64encode(key(shard).encode()).decode()
        is_same = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(version)}
        put = {"request_put": {"key": name, "value": b64encode(content).decode()}}
        try:
            done = client.transaction({"compare": [is_same], "success": [put]})
        except Etcd3Exception as error:
            raise ConnectionError(error.detail_text or repr(error)) from error
        return int(done["header"]["revision"]) if done.get("succeeded") else 0

    return RecordStore(read, write, client.session.close)
