from __future__ import annotations

from contextlib import closing
from pathlib import Path

from fleet_sparse.net_addresses import Address
from fleet_sparse.pserver.server import Options, make_shard
from fleet_sparse.settings import Settings
from support.saves import save
from support.shards import SGD, FrameClient, floats, ids_of, push
from support.shards import make_shard as shard_of


def test_restarted_pserver_takes_the_snapshot_that_replaced_its(tmp_path: Path) -> None:
    client = FrameClient(shard_of(SGD))
    client.push(push(SGD, ids_of(7), floats([1, 1])))
    save([client.shard], tmp_path / "model", save_id="one")
    client.push(push(SGD, ids_of(8), floats([1, 1])))
    save([client.shard], tmp_path / "model", save_id="two")  # the only one that stays
    address = Address("127.0.0.1", 0)
    options = Options(0, 1, address, (address,), recover="model/000001-full")
    shard, loaded = make_shard(options, Settings(root=str(tmp_path)))
    with closing(shard):
        assert loaded is not None
        assert (loaded.manifest.number, shard.states()[0].num_rows) == (2, 2)
