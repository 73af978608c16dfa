"""The frames of a read: every row and value is asked for once, at its shard, in frames that are small enough."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.serving.read_plan import frames_of_read
from fleet_sparse.wire.frame_format import BLOCK_BYTES, HEADER_BYTES
from support.snapshots import ADAM, DENSE, SGD


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("max_frame_bytes", [400, 1 << 20])
def test_each_row_and_value_is_asked_for_once(num_shards: int, max_frame_bytes: int) -> None:
    placement = Placement.even(num_shards)
    ids = {ADAM: np.arange(-20, 40), SGD: np.array([5, 5, 2**63 - 1, -(2**63)])}
    found = {spec.name: np.zeros(len(each), int) for spec, each in ids.items()} | {
        DENSE.name: np.zeros(DENSE.num_values, int)
    }
    for frame in frames_of_read(ids.items(), [DENSE], placement, max_frame_bytes):
        sizes = [(each.num_values, each.dim) for each in frame.pieces]
        assert HEADER_BYTES + sum(BLOCK_BYTES + count * 4 * dim for count, dim in sizes) <= max_frame_bytes
        for piece in frame.pieces:
            found[piece.spec.name][piece.places] += 1
            if isinstance(piece.spec, TableSpec):
                assert piece.ids is not None
                assert piece.ids.tolist() == ids[piece.spec][piece.places].tolist()
                assert set(placement.shard_of(piece.ids, piece.spec.salt)) == {frame.shard}
            else:
                assert isinstance(piece.spec, DenseSpec)
                begin, _ = DENSE.range_of(frame.shard, num_shards)
                assert isinstance(piece.places, slice)
                assert piece.places.start == begin + piece.offset
    assert all((each == 1).all() for each in found.values())


def test_what_asks_for_nothing_has_no_frame() -> None:
    assert frames_of_read([(SGD, np.empty(0, np.int64))], [], Placement.even(2), 1 << 20) == []
