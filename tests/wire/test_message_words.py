from __future__ import annotations

import struct

import numpy as np
import pytest

from fleet_sparse.wire import message_words
from fleet_sparse.wire.frame_format import BLOCK, BLOCK_OFFSETS, HEADER, HEADER_OFFSETS


def words_with(layout: struct.Struct, field: int, num_fields: int) -> list[int]:
    """The words of a layout whose fields are 0 but for one."""
    values = layout.unpack(bytes(layout.size))
    assert len(values) == num_fields
    one = b"\x01" if isinstance(values[field], bytes) else type(values[field])(1)
    return np.frombuffer(layout.pack(*values[:field], one, *values[field + 1 :]), np.uint64).tolist()


@pytest.mark.parametrize(("layout", "offsets"), [(HEADER, HEADER_OFFSETS), (BLOCK, BLOCK_OFFSETS)])
def test_offsets_are_those_of_the_layout(layout: struct.Struct, offsets: dict[str, int]) -> None:
    for field, offset in enumerate(offsets.values()):
        words = words_with(layout, field, len(offsets))
        assert [number for number, word in enumerate(words) if word] == [offset // 8]
        assert words[offset // 8] >> 8 * (offset % 8) in (1, np.float64(1).view(np.uint64))


@pytest.mark.parametrize(
    ("layout", "offsets", "name", "field"),
    [
        *((HEADER, HEADER_OFFSETS, name, name) for name in ("op", "cluster_id", "num_blocks", "request_id")),
        *((HEADER, HEADER_OFFSETS, name, name) for name in ("push_seq", "push_floor", "step", "head_bytes")),
        *((HEADER, HEADER_OFFSETS, name, name) for name in ("column_bytes", "checksum")),
        (HEADER, HEADER_OFFSETS, "reserved", "reserved_2"),
        *((BLOCK, BLOCK_OFFSETS, name, name) for name in ("count", "learning_rate", "optimizer_step")),
        (BLOCK, BLOCK_OFFSETS, "scale", "gradient_scale"),
    ],
)
def test_words_are_those_of_the_layout(layout: struct.Struct, offsets: dict[str, int], name: str, field: str) -> None:
    words = words_with(layout, [*offsets].index(field), len(offsets))
    assert words[getattr(message_words, f"{name.upper()}_WORD")]


def test_shifts_are_those_of_the_layout() -> None:
    names = [*HEADER_OFFSETS]
    flags = words_with(HEADER, names.index("flags"), len(names))
    num_blocks = words_with(HEADER, names.index("num_blocks"), len(names))
    assert flags[message_words.OP_WORD] == 1 << message_words.FLAGS_SHIFT
    assert num_blocks[message_words.NUM_BLOCKS_WORD] == 1 << message_words.NUM_BLOCKS_SHIFT
