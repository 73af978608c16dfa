"""Files of labelled examples and of feeds: read, predicted in batches, refused."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.errors import SettingError
from fleet_sparse.serving.labelled import LabelledExamples, predictions, read_labelled, target_of
from fleet_sparse.serving.model import ServedModel, Tensor
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


@pytest.mark.parametrize("write", [objects, one_array, pickled, torn, Path.touch, lambda path: None])
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
