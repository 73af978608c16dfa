from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.models import slots
from fleet_sparse.models.source import Batch

SLOTS = ("1", "2", "7")


def read(path: Path) -> Batch:
    (batch,) = slots.source(path, path, slots=SLOTS, num_dense=2, batch_size=8).test()
    return batch


def test_slots_become_label_dense_and_ids(write: Callable[..., Path]) -> None:
    batch = read(write("click:1 dense_feature:0.5 dense_feature:-1e-3 1:11 2:22 7:77", "7:7 2:2 click:0 1:1"))
    assert batch.label.tolist() == [[1], [0]]
    np.testing.assert_allclose(batch.dense, [[0.5, -1e-3], [0, 0]])
    assert batch.ids.tolist() == [[11, 22, 77], [1, 2, 7]]


def test_a_missing_slot_has_feasign_0_an_unknown_one_is_ignored(write: Callable[..., Path]) -> None:
    assert read(write("click:0 2:5 99:3 x:y")).ids.tolist() == [[0, 5, 0]]


def test_a_feasign_keeps_all_its_64_bits(write: Callable[..., Path]) -> None:
    ids = read(write(f"click:0 1:{2**64 - 1} 2:{2**63} 7:{-(2**63)}")).ids
    assert ids.tolist() == [[-1, -(2**63), -(2**63)]]


def test_the_layout_of_the_docstring_is_read(write: Callable[..., Path]) -> None:
    dense = " ".join(f"dense_feature:{value / 13}" for value in range(13))
    path = write(f"click:0 {dense} " + " ".join(f"{slot}:{slot}000" for slot in range(1, 27)))
    (batch,) = slots.source(path, path, slots=slots.CRITEO_SLOTS, num_dense=13, batch_size=8).train(0, 0, 1)
    assert batch.ids.tolist() == [[slot * 1000 for slot in range(1, 27)]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("click:0 1", "'1' should be slot:feasign"),
        ("1:5", "no label"),
        ("click:2", "'click:2' should be click:0 or click:1, once"),
        ("click:1 click:0", "'click:0' should be click:0 or click:1, once"),
        ("click:0 1:a", "'1:a' should have an integer"),
        ("click:0 1:18446744073709551616", "'1:18446744073709551616' does not fit 64 bits"),
        ("click:0 2:5 2:6", "'2:6' is the second feasign of slot '2', should be one"),
        ("click:0 dense_feature:x dense_feature:1", "'dense_feature:x' should be a number"),
        ("click:0 dense_feature:nan dense_feature:1", "'dense_feature:nan' should be a finite number"),
        ("click:0 dense_feature:1", "1 values of dense_feature, should be 2 or none"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(write: Callable[..., Path], text: str, complaint: str) -> None:
    path = write("click:0 1:1", "click:1 1:1", text, name="part-0")
    with pytest.raises(ValueError, match=f"part-0:3: {complaint}"):
        read(path)


@pytest.mark.parametrize("wrong", [("1", "1"), ("1", "click"), ("dense_feature",)])
def test_slots_that_are_not_fields_are_refused(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="slots: "):
        slots.source(Path("part-0"), None, slots=wrong, num_dense=2, batch_size=8)
