"""Files of labelled examples and of feeds: read, predicted in batches, refused."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.errors import SettingError
from fleet_sparse.serving.feeds import checked_feed
from fleet_sparse.serving.labelled import LabelledExamples, predictions, read_labelled, target_of
from fleet_sparse.serving.model import Lengths, ServedModel, Tensor
from fleet_sparse.serving.npz_file import read_npz, write_npz

FEEDS = (Tensor("ids", "int64", (-1, 3)), Tensor("scale", "float32", (1,)))


def model(*targets: str) -> ServedModel:
    results = tuple(Tensor(name, "float32", (-1, 1)) for name in targets)
    return ServedModel(1, "", "", "", "000001", (), FEEDS, results, (), (), (), True, ())


def written(path: Path, **arrays: NDArray[Any]) -> Path:
    np.savez(path, allow_pickle=True, **arrays)
    return path


def doubled(feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {"prob": feed["ids"][:, :1] * feed["scale"]}


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float32])
def test_labels_are_taken_from_the_inputs(tmp_path: Path, shape: tuple[int, ...], dtype: type) -> None:
    labels = np.arange(6) % 2
    path = written(tmp_path / "a.npz", ids=np.ones((6, 3)), click=labels.astype(dtype).reshape(shape))
    examples = read_labelled(path, "click")
    assert list(examples.feed) == ["ids"]
    assert examples.labels.tolist() == labels.astype(bool).tolist()


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (np.array([0, 1, 2, 0, 1, 1]), "'label'"),
        (np.array([0, 1, np.nan, 0, 1, 1]), "'label'"),
        (np.array([["a"], ["b"]]), "'label'"),
        (np.array([0, 1, 0, 0]), "1 labels 1 and 3 labels 0"),
        (np.ones(6), "6 labels 1 and 0 labels 0"),
        (np.empty(0), "0 labels 1 and 0 labels 0"),
        (np.ones((3, 2)), r"\(3, 2\)"),
        (np.array(1), r"\(\)"),
    ],
)
def test_labels_should_be_0_and_1(tmp_path: Path, labels: NDArray[Any], named: str) -> None:
    path = written(tmp_path / "a.npz", ids=np.ones(6), label=labels)
    with pytest.raises(SettingError, match=named):
        read_labelled(path, "label")


def test_a_file_without_labels_names_its_arrays(tmp_path: Path) -> None:
    path = written(tmp_path / "a.npz", ids=np.ones(6), click=np.ones(6))
    with pytest.raises(SettingError, match=r"'label'.*ids, click"):
        read_labelled(path, "label")


def test_all_batches_are_predicted() -> None:
    ids = np.arange(10_000 * 3).reshape(-1, 3)
    examples = LabelledExamples("a.npz", {"ids": ids, "scale": np.array([2.0])}, np.arange(10_000) % 2 == 0)
    assert predictions(model("prob"), doubled, examples, "prob").tolist() == (ids[:, 0] * 2.0).tolist()


RAGGED = msgspec.structs.replace(
    model("prob"),
    feeds=(Tensor("tags", "int64", (-1,)), Tensor("tags.lengths", "int64", (-1,))),
    ragged=("tags",),
    lengths=(Lengths("tags.lengths", "tags"),),
)


def summed(feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    arrays = checked_feed(RAGGED, feed)
    ends = np.append(0, np.cumsum(arrays["tags.lengths"]))
    return {"prob": np.diff(np.append(0, np.cumsum(arrays["tags"]))[ends])}


@pytest.mark.parametrize("lengths_are_fed", [True, False])
def test_fields_of_variable_length_are_cut_between_examples(lengths_are_fed: bool) -> None:
    lengths = np.arange(5000) % 4
    tags = np.arange(lengths.sum())
    examples = LabelledExamples("a.npz", {"tags": tags, "tags.lengths": lengths}, np.arange(5000) % 2 == 0)
    served = RAGGED if lengths_are_fed else msgspec.structs.replace(RAGGED, lengths=())
    found = predictions(served, summed, examples, "prob")
    assert found.tolist() == summed(examples.feed)["prob"].tolist()


@pytest.mark.parametrize("num_more", [-1, 1])
def test_ids_without_an_example_are_refused(num_more: int) -> None:
    lengths = np.ones(5000, np.int64)
    examples = LabelledExamples("a.npz", {"tags": np.arange(5000 + num_more), "tags.lengths": lengths}, lengths == 1)
    with pytest.raises(SettingError, match=r"a\.npz: feed 'tags.lengths'"):
        predictions(RAGGED, summed, examples, "prob")
    examples.feed["tags.lengths"] = np.ones(5000)
    with pytest.raises(SettingError, match=r"'tags\.lengths': is float64"):
        predictions(RAGGED, summed, examples, "prob")


def test_numbers_of_examples_and_predictions_should_agree() -> None:
    labels = np.arange(6) % 2 == 0
    examples = LabelledExamples("a.npz", {"ids": np.ones((5, 3)), "scale": np.ones(1)}, labels)
    with pytest.raises(SettingError, match="'ids' has 5 examples, there are 6 labels"):
        predictions(model("prob"), doubled, examples, "prob")
    examples = LabelledExamples("a.npz", {"ids": np.ones((6, 3)), "scale": np.ones(1)}, labels)
    with pytest.raises(SettingError, match=r"'prob' has shape \(6, 3\) for 6 examples"):
        predictions(model("prob"), lambda feed: {"prob": feed["ids"]}, examples, "prob")


def test_a_wrong_input_is_named_with_its_file() -> None:
    def refuses(feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        raise ValueError("feed 'more': is unknown")

    with pytest.raises(SettingError, match=r"a\.npz: feed 'more'"):
        predictions(model("prob"), refuses, LabelledExamples("a.npz", {}, np.ones(2, np.bool_)), "prob")


def test_the_target_is_the_only_one_or_is_named() -> None:
    assert target_of(model("prob"), None) == "prob"
    assert target_of(model("prob", "logit"), "logit") == "logit"
    for names, target in ((("prob", "logit"), None), (("prob",), "absent")):
        with pytest.raises(SettingError, match="'prob'"):
            target_of(model(*names), target)


def test_arrays_of_any_name_are_written_and_read(tmp_path: Path) -> None:
    arrays = {"file": np.arange(3), "a.b/c": np.float32([[1, np.nan]]), "version.number": np.array(7)}
    write_npz(tmp_path / "out", arrays)
    found = read_npz(tmp_path / "out")
    assert list(found) == list(arrays)
    assert all(found[name].tobytes() == array.tobytes() for name, array in arrays.items())
    with pytest.raises(SettingError):
        write_npz(tmp_path / "absent" / "out", arrays)


def objects(path: Path) -> None:
    written(path, ids=np.array([{}]))


def one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({}))


def torn(path: Path) -> None:
    written(path, ids=np.ones(1000))
    path.write_bytes(path.read_bytes()[:500])


def damaged(path: Path) -> None:
    np.savez_compressed(path, ids=np.arange(3000))
    content = bytearray(path.read_bytes())
    content[60:200] = bytes(140)
    path.write_bytes(content)


def too_large(path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**13, 3)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ids.npy", header.getvalue())


def with_flags(path: Path, offset: int, value: int) -> None:
    """Changes a byte of the headers of the member, in the file and in the index at its end."""
    written(path, ids=np.ones(3))
    content = bytearray(path.read_bytes())
    content[4 + offset] = content[content.index(b"PK\x01\x02") + 6 + offset] = value
    path.write_bytes(content)


def encrypted(path: Path) -> None:
    with_flags(path, 2, 1)


def packed_otherwise(path: Path) -> None:
    with_flags(path, 4, 99)


WRITERS = [objects, one_array, pickled, torn, damaged, too_large, encrypted, packed_otherwise, Path.touch]


@pytest.mark.parametrize("write", [*WRITERS, lambda path: None])
def test_what_is_no_file_of_arrays_is_refused_by_path(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "feeds.npz"
    write(path)
    with pytest.raises(SettingError, match=r"feeds\.npz"):
        read_npz(path)


@pytest.mark.parametrize(
    ("write", "reason"), [(pickled, "it is no .npz file"), (lambda path: None, "No such file or directory")]
)
def test_a_refused_file_is_named_once_without_advice_of_numpy(tmp_path: Path, write: Any, reason: str) -> None:
    path = tmp_path / "feeds.npz"
    write(path)
    with pytest.raises(SettingError) as refused:
        read_npz(path)
    assert str(refused.value) == f"{path}: cannot be read: {reason}. It should be a file of numpy.savez"
    with pytest.raises(SettingError) as refused:
        write_npz(tmp_path / "absent" / "out", {})
    assert str(refused.value) == f"{tmp_path}/absent/out: cannot be written: No such file or directory"
