from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.models import criteo
from fleet_sparse.models.feature_id import feature_ids


def line(label: str = "0", integers: dict[int, str] | None = None, categories: dict[int, str] | None = None) -> str:
    """A line whose I`i` are `i` and C`i` are `i` in hexadecimal, but for what is given."""
    columns = [label]
    columns += [(integers or {}).get(i, str(i)) for i in range(1, 14)]
    columns += [(categories or {}).get(i, f"{i:08x}") for i in range(1, 27)]
    return "\t".join(columns)


def test_columns_become_label_dense_and_ids(write: Callable[..., Path]) -> None:
    path = write(line("1"), line("0", {2: "100"}, {26: "deadbeef"}))
    (batch,) = criteo.source(path, path, batch_size=8).test()
    assert batch.label.tolist() == [[1], [0]]
    assert batch.dense.dtype == np.float32
    np.testing.assert_allclose(batch.dense[1, :3], np.log1p([1, 100, 3]), rtol=1e-6)
    assert batch.ids.shape == (2, 26)
    assert batch.ids[:, 25].tolist() == feature_ids("C26", ["0000001a", "deadbeef"]).tolist()


def test_empty_columns_are_zero_and_a_value_of_their_own(write: Callable[..., Path]) -> None:
    path = write(line("1", {5: ""}, {3: ""}))
    (batch,) = criteo.source(path, path, batch_size=8).test()
    assert batch.dense[0, 4] == 0
    assert batch.ids[0, 2] == feature_ids("C3", [""])[0]


def test_negative_integers_are_taken_as_zero(write: Callable[..., Path]) -> None:
    path = write(line("1", {2: "-2"}))
    (batch,) = criteo.source(path, path, batch_size=8).test()
    assert batch.dense[0, 1] == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (line().rsplit("\t", 1)[0], r"39 columns separated by tabs, should be 40 .*without labels"),
        ("", "1 columns"),
        (line() + "\t", "41 columns"),
        (line("2"), "the label is '2', should be 0 or 1"),
        (line(integers={7: "1.5"}), r"I7 is '1\.5', should be an integer or empty"),
        (line(categories={9: "xyz"}), "C9 is 'xyz', should be up to 16 hexadecimal digits"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(write: Callable[..., Path], text: str, complaint: str) -> None:
    path = write(line(), line(), line(), text, name="day_1.tsv")
    batches = criteo.source(path, path, batch_size=2).train(0, 0, 1)
    assert len(next(batches).label) == 2
    with pytest.raises(ValueError, match=rf"day_1\.tsv:4: {complaint}"):
        next(batches)
