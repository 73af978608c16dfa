"""What is said about a wrong feed, before anything is asked."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fleet_sparse.serving.feeds import checked_feed
from fleet_sparse.serving.model import Lengths, ModelLookup, ServedModel, Tensor

MODEL = ServedModel(
    number=1,
    saved_at="",
    fleet_sparse="",
    paddle="",
    networks="1",
    files=(),
    feeds=(Tensor("ids", "int64", (-1, 4)), Tensor("dense", "float32", (-1, 3))),
    targets=(),
    tables=(),
    lookups=(ModelLookup("t", 2, "ids", (-1, 4), "int64", None, 10),),
    dense=(),
    is_split=True,
    check=(),
)
IDS, DENSE = np.zeros((2, 4), np.int64), np.zeros((2, 3), np.float32)


def test_inputs_become_arrays_of_their_dtypes() -> None:
    found = checked_feed(MODEL, {"ids": IDS.astype(np.int32).tolist(), "dense": DENSE.astype(np.float64)})
    assert {name: (str(each.dtype), each.shape) for name, each in found.items()} == {
        "ids": ("int64", (2, 4)),
        "dense": ("float32", (2, 3)),
    }


def test_a_batch_may_be_empty() -> None:
    assert checked_feed(MODEL, {"ids": IDS[:0], "dense": DENSE[:0]})["ids"].shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"dense": None}, ("'dense'", "(-1, 3)", "float32")),
        ({"other": IDS}, ("'other'", "ids, dense")),
        ({"ids": IDS.astype(np.float32)}, ("'ids'", "float32", "int64")),
        ({"ids": IDS[:, :3]}, ("'ids'", "(2, 3)", "(-1, 4)")),
        ({"ids": IDS[0]}, ("'ids'", "(4,)", "(-1, 4)")),
        ({"ids": IDS[:1]}, ("ids 1", "dense 2")),
        ({"ids": IDS + 10}, ("'ids'", "10", "0 to 9")),
        ({"ids": IDS - 1}, ("'ids'", "-1", "0 to 9")),
        ({"ids": np.full((2, 4), 2**64 - 1, np.uint64)}, ("'ids'", str(2**64 - 1), "int64")),
        ({"ids": [[1, 2, 3, 4], [1]]}, ("'ids'", "int64", "(-1, 4)")),
        ({"dense": [["a", "b", "c"]] * 2}, ("'dense'", "<U1", "float32")),
        ({"dense": [[1.0, None, 2.0]] * 2}, ("'dense'", "object", "float32")),
        ({"dense": DENSE + 1j}, ("'dense'", "complex", "float32")),
    ],
)
def test_a_wrong_feed_is_named(changes: dict[str, Any], facts: tuple[str, ...]) -> None:
    feed = {name: each for name, each in {"ids": IDS, "dense": DENSE, **changes}.items() if each is not None}
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # facts are checked below
        checked_feed(MODEL, feed)
    assert [fact for fact in facts if fact not in str(refused.value)] == []


@pytest.mark.parametrize("id_", [2**31, -(2**31) - 1])
def test_an_id_of_more_than_32_bits_is_no_int32(id_: int) -> None:
    model = msgspec.structs.replace(MODEL, feeds=(Tensor("ids", "int32", (-1, 4)), MODEL.feeds[1]), lookups=())
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # facts are checked below
        checked_feed(model, {"ids": IDS + id_, "dense": DENSE})
    assert [fact for fact in ("'ids'", str(id_), "int32") if fact not in str(refused.value)] == []
    fits = checked_feed(model, {"ids": IDS + 2**31 - 1, "dense": DENSE})["ids"]
    assert (fits.dtype, fits.max()) == (np.int32, 2**31 - 1)


FIELDS = msgspec.structs.replace(
    MODEL,
    feeds=(
        *(Tensor(name, "int64", (-1,)) for name in ("tags", "tags.lengths", "lengths")),
        Tensor("weights", "float32", (-1, 1)),
        Tensor("padded", "int64", (-1, 3)),
    ),
    lookups=(),
    ragged=("tags", "weights"),
    lengths=(Lengths("tags.lengths", "tags"), Lengths("tags.lengths", "weights"), Lengths("lengths", "padded")),
)
FIELDS_FEED = {
    "tags": np.arange(4),
    "tags.lengths": np.array([3, 0, 1]),
    "weights": np.ones((4, 1)),
    "padded": np.zeros((3, 3), np.int64),
    "lengths": np.array([0, 3, 1]),
}


def test_fields_of_variable_length_may_have_any_lengths_that_fit() -> None:
    assert list(checked_feed(FIELDS, FIELDS_FEED)) == ["tags", "tags.lengths", "lengths", "weights", "padded"]
    assert len(checked_feed(FIELDS, {name: each[:0] for name, each in FIELDS_FEED.items()})["tags"]) == 0


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"tags.lengths": [3, 0, 2]}, ("'tags.lengths'", "'tags'", "(4,)", "5", "should be 4")),
        ({"tags.lengths": [5, 0, -1]}, ("'tags.lengths'", "-1", "(4,)", "0 or more")),
        ({"weights": np.ones((3, 1))}, ("'tags.lengths'", "'weights'", "(3, 1)", "4", "should be 3")),
        ({"lengths": [0, 4, 1]}, ("'lengths'", "'padded'", "(3, 3)", "4", "0 to 3")),
        ({"lengths": [0, -1, 1]}, ("'lengths'", "'padded'", "-1", "0 to 3")),
        ({"lengths": [0, 1]}, ("tags.lengths 3", "lengths 2", "padded 3")),
    ],
)
def test_lengths_that_do_not_fit_are_named(changes: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # facts are checked below
        checked_feed(FIELDS, {**FIELDS_FEED, **changes})
    assert [fact for fact in facts if fact not in str(refused.value)] == []
