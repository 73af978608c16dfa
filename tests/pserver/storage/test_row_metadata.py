from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.pserver.storage.row_metadata import MAX_DAYS, RowMetadata


def indices(*rows):
    return np.array(rows, np.int64)


def notes_on(num_rows):
    notes = RowMetadata("table 'C1'")
    notes.make_room(num_rows)
    return notes


def rows_of(bits):
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


def changed(notes):
    changes = notes.begin_capture()
    notes.end_capture(changes)
    return rows_of(changes.rows)


def unseen(notes, max_unseen_days):
    return rows_of(notes.unseen(max_unseen_days))


def load(notes, *rows, days=None):
    last_days = None if days is None else np.array(days, np.uint16)
    notes.note_load(indices(*rows), indices(*rows), last_days)


def test_pushed_rows_changed():
    notes = notes_on(10)
    notes.note_push(indices(3, 9, 3))
    assert changed(notes) == [3, 9]


def test_changes_are_counted():
    notes = notes_on(5000)
    notes.note_push(np.arange(0, 5000, 7))
    assert notes.begin_capture().num_rows == len(range(0, 5000, 7))


def test_loaded_rows_did_not_change():
    notes = notes_on(10)
    load(notes, 4)
    assert changed(notes) == []


def test_loaded_row_whose_id_was_removed_did_change():
    notes = notes_on(10)
    notes.note_removal(np.array([77]), indices(-1))
    notes.make_room(11)
    notes.note_load(np.array([5, 77]), indices(9, 10), None)
    assert changed(notes) == [10]


def test_what_changed_before_a_kept_capture_is_forgotten_and_what_changed_since_is_not():
    notes = notes_on(10)
    notes.note_push(indices(1))
    notes.begin_capture()
    notes.note_push(indices(2))
    notes.end_capture()
    assert changed(notes) == [2]


def test_what_changed_before_a_capture_that_was_not_kept_still_did():
    notes = notes_on(10)
    notes.note_push(indices(1))
    notes.note_removal(np.array([77]), indices(-1))
    changes = notes.begin_capture()
    notes.make_room(3000)
    notes.note_push(indices(2, 2999))
    notes.end_capture(changes)
    again = notes.begin_capture()
    assert rows_of(again.rows) == [1, 2, 2999]
    assert [ids.tolist() for ids in again.removed] == [[77]]


def test_changes_of_a_capture_stay_what_they_are():
    notes = notes_on(10)
    notes.note_push(indices(1))
    changes = notes.begin_capture()
    notes.note_push(indices(2))
    assert rows_of(changes.rows) == [1]


def test_notes_stay_when_rows_come():
    notes = notes_on(10)
    notes.end_day()
    notes.note_push(indices(3))
    notes.end_day()
    notes.note_push(indices(4))
    notes.make_room(100_000)
    assert changed(notes) == [3, 4]
    assert notes.last_days[[3, 4, 99_999]].tolist() == [1, 2, 0]


def test_notes_move_with_their_rows():
    notes = notes_on(4)
    notes.end_day()
    notes.note_push(indices(3))
    notes.note_removal(None, indices(-1, 0))
    assert changed(notes) == [0]
    assert notes.last_days[:4].tolist() == [1, 0, 0, 0]


def test_removal_that_is_not_noted_leaves_no_id():
    notes = notes_on(4)
    notes.note_removal(None, indices(-1))
    assert notes.begin_capture().removed == ()


# Days.


def test_nothing_is_kept_of_days_before_the_first_one_ends():
    notes = notes_on(1000)
    before = notes.num_bytes
    load(notes, 4, days=[0])
    assert (notes.last_days, notes.num_bytes) == (None, before)
    notes.end_day()
    assert notes.num_bytes >= before + 2 * 1000


def test_rows_are_unseen_by_the_days_that_ended_since_their_last_push():
    notes = notes_on(4)
    for row in range(3):
        notes.note_push(indices(row))
        notes.end_day()
    # Rows 0 and 3 were there on day 0, on which no row is told from another.
    assert [unseen(notes, days) for days in range(4)] == [[0, 1, 2, 3], [0, 1, 3], [0, 3], []]


def test_no_row_is_unseen_while_no_day_has_ended():
    assert unseen(notes_on(4), 0) == []


def test_rows_without_a_day_are_loaded_today():
    notes = notes_on(3)
    notes.set_days(7)
    load(notes, 1)
    notes.end_day()
    assert unseen(notes, 1) == [0, 2]


def test_loaded_day_replaces_the_push_of_today():
    notes = notes_on(3)
    notes.set_days(7)
    notes.note_push(indices(0, 1, 2))
    load(notes, 1, 2, days=[3, 7])
    assert unseen(notes, 3) == [1]


def test_days_that_a_capture_reads_stay_what_they_are_when_rows_are_loaded():
    notes = notes_on(3)
    notes.set_days(7)
    notes.note_push(indices(1))
    notes.begin_capture()
    read = notes.last_days
    load(notes, 1, days=[2])
    assert read[:3].tolist() == [0, 7, 0]
    assert notes.last_days[:3].tolist() == [0, 2, 0]


def test_days_go_back_only_while_there_are_no_rows():
    notes = notes_on(0)
    notes.set_days(7)
    notes.set_days(0)
    assert (notes.days, notes.last_days) == (0, None)
    notes.set_days(3)
    notes.make_room(1)
    with pytest.raises(ValueError, match="table 'C1': days are set to 2, should be 3 to 65535"):
        notes.set_days(2)
    assert notes.days == 3


def test_days_have_an_end():
    notes = notes_on(1)
    notes.set_days(MAX_DAYS)
    with pytest.raises(ValueError, match="table 'C1': 65535 days have ended, there should be no more"):
        notes.end_day()
    with pytest.raises(ValueError, match="table 'C1': days are set to 65536, should be 65535 to 65535"):
        notes.set_days(MAX_DAYS + 1)
    assert notes.days == MAX_DAYS
