from __future__ import annotations

import mmap
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

from fleet_sparse.pserver.storage.row_metadata import MAX_DAYS, RowMetadata


def indices(*rows):
    return np.array(rows, np.int64)


def metadata_on(num_rows):
    metadata = RowMetadata("table 'C1'", 1 << 17)
    metadata.grow(num_rows)
    return metadata


def rows_of(bits):
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


def changed(metadata):
    changes = metadata.begin_capture()
    metadata.end_capture(changes)
    return rows_of(changes.rows)


def test_loaded_row_whose_id_was_removed_did_change():
    metadata = metadata_on(10)
    metadata.note_removal(np.array([77]), indices(-1))
    metadata.grow(11)
    metadata.note_load(np.array([5, 77]), indices(9, 10))
    assert changed(metadata) == [10]


def days_of(metadata, num_rows):
    days = np.zeros(1 << 17, np.uint16)
    metadata.write_days(days)
    return days[:num_rows].tolist()


def test_bits_stay_when_the_store_grows():
    metadata = metadata_on(10)
    metadata.set_num_days(1)
    metadata.note_push(indices(3))
    metadata.grow(100_000)
    assert days_of(metadata, 100_000) == [0, 0, 0, 1, *[0] * 99_996]
    assert changed(metadata) == [3]


@pytest.mark.parametrize("num_days", [0, 1])
def test_growing_maps_and_allocates_no_memory(monkeypatch, num_days):
    metadata = metadata_on(10)
    metadata.set_num_days(num_days)
    monkeypatch.setattr(mmap, "mmap", None)
    tracemalloc.start()
    metadata.grow(1 << 17)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1000


def test_bits_move_with_their_rows():
    metadata = metadata_on(4)
    metadata.set_num_days(1)
    metadata.note_push(indices(3))
    metadata.note_removal(None, indices(-1, 0))
    assert changed(metadata) == [0]
    assert days_of(metadata, 4) == [1, 0, 0, 0]


@pytest.mark.parametrize(("num_days", "num_rows", "allowed"), [(0, 0, True), (0, 1, False), (MAX_DAYS + 1, 0, False)])
def test_age_goes_back_only_while_there_are_no_rows(num_days, num_rows, allowed):
    metadata = metadata_on(num_rows)
    metadata.set_num_days(7)
    with nullcontext() if allowed else pytest.raises(ValueError, match=str(num_days)):
        metadata.check_num_days(num_days)


def test_age_is_bounded():
    metadata = metadata_on(1)
    metadata.set_num_days(MAX_DAYS)
    with pytest.raises(ValueError, match=str(MAX_DAYS)):
        metadata.check_end_day()
