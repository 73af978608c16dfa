"""`fleet.save_inference_model` and `fleet.load_inference_model` in a job of one worker."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

from fleet_sparse.errors import FleetSparseError, PlanError, SnapshotError
from fleet_sparse.serving.model import read_model
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.transpiler import inference
from support.programs import flagged, ids_input, linear, minimize, start

IDS = np.array([[1, 2, 3], [-1, 2**63 - 1, -(2**63)]])


@pytest.fixture(autouse=True)
def directory(plugin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fleet.init()
    yield tmp_path
    fleet.stop_worker()


def built():
    """Builds and minimizes a network; returns its prediction and loss."""
    rows = flagged(ids_input((-1, 3)), value=None)
    features = paddle.sum(rows, axis=1)
    prediction = paddle.nn.functional.sigmoid(linear(paddle.square(features)) + paddle.sum(features, 1, keepdim=True))
    loss = paddle.mean(paddle.square(prediction - paddle.static.data("label", [-1, 1], "float32")))
    minimize(loss)
    return prediction, loss


def trained():
    prediction, loss = built()
    executor = start()
    for _ in range(2):
        executor.run(feed={"ids": IDS, "label": np.ones((2, 1), np.float32)}, fetch_list=[loss])
    return executor, prediction


def test_a_trained_program_is_saved_and_checked(directory):
    executor, prediction = trained()
    fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
    model = read_model(directory_at(directory / "serve"))
    assert (model.number, model.networks, model.is_split) == (1, "000001", True)
    assert [(each.name, each.dtype, each.shape) for each in model.feeds] == [("ids", "int64", (-1, 3))]
    assert [(each.table, each.feed, each.shape) for each in model.lookups] == [("emb", "ids", (-1, 3))]
    assert {(each.network, each.configuration) for each in model.check} == {
        (network, configuration) for network in ("forward", "network") for configuration in ("default", "oneDNN off")
    }
    assert max(each.difference for each in model.check) < 1e-6
    assert [parameter.name for array in model.dense for parameter in array.parameters] == ["w"]
    assert (directory / "serve" / "rows" / "000001-full" / "MANIFEST.json").is_file()
    with np.load(directory / "serve" / "networks" / "000001" / "check.npz") as examples:
        assert examples["feed.ids"].tolist() == IDS.tolist()


@pytest.mark.filterwarnings("ignore:Be sure that you have set auc states")  # of Paddle, as after each save of an AUC
@pytest.mark.parametrize("is_cast", [False, True])
def test_an_auc_is_saved_with_what_it_is_computed_from(directory, is_cast):
    rows = flagged(ids_input((-1, 3)), value=None)
    prediction = paddle.nn.functional.sigmoid(paddle.sum(rows, axis=[1, 2]).reshape([-1, 1]))
    label = paddle.static.data("label", [-1, 1], "int64")
    auc, _, _ = paddle.static.auc(paddle.concat([1 - prediction, prediction], 1), label, slide_steps=1)
    target = paddle.cast(auc, "float32") if is_cast else auc
    minimize(paddle.mean(paddle.square(prediction - paddle.cast(label, "float32"))))
    executor = start()
    executor.run(feed={"ids": IDS, "label": np.array([[0], [1]])}, fetch_list=[target])
    fleet.save_inference_model(executor, "serve", ["ids", "label"], [target])
    model = read_model(directory_at(directory / "serve"))
    assert [each.name for each in model.feeds] == ["ids", "label"]
    assert [each.table for each in model.lookups] == ["emb"]
    assert max(each.difference for each in model.check) < 1e-6


def test_a_delta_replaces_the_networks(directory):
    executor, prediction = trained()
    fleet.save_inference_model(executor, "serve", ["ids"], prediction)
    named = read_model(directory_at(directory / "serve"))
    ids = inference.inputs_of(paddle.static.default_main_program())["ids"]
    fleet.save_inference_model(executor, "serve", [ids], [prediction.name], mode=1)  # a Value and a name the other way
    model = read_model(directory_at(directory / "serve"))
    assert (model.number, model.feeds, model.targets) == (2, named.feeds, named.targets)
    assert [path.name for path in (directory / "serve" / "networks").iterdir()] == ["000002"]
    assert sorted(path.name for path in (directory / "serve" / "rows").iterdir()) == ["000001-full", "000002-delta"]


def test_a_failed_check_names_value_and_configuration(directory, monkeypatch):
    """Without the protection from oneDNN the networks predict otherwise in the default configuration."""
    executor, prediction = trained()
    serving = directory / "serve" / "SERVING.json"
    facts = (f"target {prediction.name!r} of the saved forward", "default configuration", "at most 1e-06")
    guard, older = inference.guard, None
    for is_guarded in (False, True, False):
        monkeypatch.setattr(inference, "guard", guard if is_guarded else lambda program, targets: [])
        if is_guarded:
            fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
            older = serving.read_bytes()
            continue
        with pytest.raises(FleetSparseError) as failed:
            fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
        assert [fact for fact in facts if fact not in str(failed.value)] == []
        assert (serving.read_bytes() if serving.exists() else None) == older
    assert read_model(directory_at(directory / "serve")).number == 2


def test_load_restores_rows_and_dense_values():
    executor, prediction = trained()
    feed = {"ids": IDS, "label": np.zeros((2, 1), np.float32)}
    evaluation = paddle.static.default_main_program().clone(for_test=True)
    fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
    (saved,) = executor.run(evaluation, feed=feed, fetch_list=[prediction])
    executor.run(feed=feed, fetch_list=[])
    (moved,) = executor.run(evaluation, feed=feed, fetch_list=[prediction])
    fleet.load_inference_model("serve", 0)
    (loaded,) = executor.run(evaluation, feed=feed, fetch_list=[prediction])
    assert moved.tolist() != saved.tolist()
    assert loaded.tolist() == saved.tolist()


def test_an_evaluation_program_is_saved_with_drawn_examples(directory):
    rows = flagged(ids_input((-1, 3)), value=None)
    prediction = linear(paddle.sum(rows, axis=1))
    executor = start()
    fleet.save_inference_model(executor, "serve", ["ids"], [prediction], paddle.static.default_main_program())
    assert read_model(directory_at(directory / "serve")).dense == ()
    with np.load(directory / "serve" / "networks" / "000001" / "check.npz") as examples:
        assert examples["feed.ids"].shape == (8, 3)


def test_computed_ids_have_a_network_of_their_own(directory):
    a, b = ids_input((-1, 2), "a"), ids_input((-1, 2), "b")
    prediction = paddle.sum(flagged(a * 1000003 + b), axis=[1, 2]) + paddle.sum(flagged(a), axis=[1, 2])
    executor = start()
    fleet.save_inference_model(executor, "serve", ["a", "b"], [prediction])
    model = read_model(directory_at(directory / "serve"))
    assert [each.feed for each in model.lookups] == [None, "a"]
    assert {each.network for each in model.check} == {"forward", "network", "ids"}


def test_ids_computed_from_rows_leave_no_split_network(directory):
    ids = ids_input((-1, 2))
    prediction = paddle.sum(flagged(paddle.cast(flagged(ids)[:, :, 0] * 10, "int64"), "other"), axis=[1, 2])
    executor = start()
    fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
    model = read_model(directory_at(directory / "serve"))
    assert not model.is_split
    assert {each.network for each in model.check} == {"forward"}


def test_networks_without_serving_json_are_no_model(directory):
    executor, prediction = trained()
    fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
    (directory / "serve" / "SERVING.json").unlink()
    with pytest.raises(SnapshotError, match=r"SERVING.json"):
        fleet.load_inference_model("serve", 0)


def test_a_changed_byte_of_serving_json_is_found(directory):
    executor, prediction = trained()
    fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
    path = directory / "serve" / "SERVING.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "number": 9}))
    with pytest.raises(SnapshotError, match="checksum"):
        read_model(directory_at(directory / "serve"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": 3}, "mode 3"),
        ({"export_for_deployment": False}, "export_for_deployment"),
        ({"feeds": []}, "'ids'"),
        ({"feeds": ["ids", "other"]}, "'other'"),
        ({"target": "nothing"}, "'nothing'"),
        ({"target": []}, "target_vars"),
        ({"main_program": 3}, "int"),
    ],
)
def test_requests_that_have_no_meaning_are_refused(directory, changes, text):
    executor, prediction = trained()
    feeds, target = changes.pop("feeds", ["ids"]), changes.pop("target", prediction)
    with pytest.raises(PlanError, match=text):
        fleet.save_inference_model(executor, "serve", feeds, target, **changes)
    assert not Path(directory, "serve").exists()


def test_targets_of_the_training_part_are_refused():
    executor, _ = trained()
    program = paddle.static.default_main_program()
    update = next(op for op in program.global_block().ops if "sgd" in op.name())
    with pytest.raises(PlanError, match="training part"):
        fleet.save_inference_model(executor, "serve", ["ids"], [update.operand_source(2)])


def in_branch(ids):
    return paddle.static.nn.cond(paddle.sum(ids) > 0, lambda: flagged(ids), lambda: flagged(ids) * 2)


def in_loop(ids):
    zero, rows = paddle.full([1], 0, "int64"), paddle.full([1, 3, 4], 0.0)

    def body(number, total):
        return number + 1, total + paddle.sum(flagged(ids), axis=0, keepdim=True)

    return paddle.static.nn.while_loop(lambda number, _: number < 2, body, [zero, rows])[1]


@pytest.mark.parametrize(("looked_up", "text"), [(in_branch, "inside pd_op.if"), (in_loop, "inside pd_op.while")])
def test_lookups_in_control_flow_are_refused(directory, looked_up, text):
    prediction = paddle.sum(looked_up(ids_input((-1, 3))), axis=[1, 2])
    executor = start()
    with pytest.raises(PlanError, match=rf"table 'emb' is {text}"):
        fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
    assert not Path(directory, "serve").exists()


@pytest.mark.parametrize("is_minimized", [True, False])
@pytest.mark.parametrize("name", ["save", "save_inference_model"])
def test_files_of_programs_with_lookups_are_refused(directory, name, is_minimized):
    if is_minimized:
        prediction, _ = built()
    else:
        prediction = linear(paddle.sum(flagged(ids_input((-1, 3))), axis=1))
    executor, program = start(), paddle.static.default_main_program()
    (ids,) = [op.result(0) for op in program.global_block().ops if op.has_attr("name") and op.str_attr("name") == "ids"]
    with pytest.raises(PlanError, match=rf"paddle.static.{name}: .*fleet.save_inference_model"):
        if name == "save":
            paddle.static.save(program, str(directory / "model"))
        else:
            paddle.static.save_inference_model(str(directory / "model"), [ids], [prediction], executor, program=program)
    assert list(directory.iterdir()) == []


def test_dygraph_mode_is_refused():
    executor, prediction = trained()
    paddle.disable_static()
    try:
        with pytest.raises(PlanError, match="dygraph"):
            fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
    finally:
        paddle.enable_static()


def test_load_refuses_other_modes():
    trained()
    with pytest.raises(PlanError, match="mode 3"):
        fleet.load_inference_model("serve", 3)
