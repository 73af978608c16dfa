"""Exports of models, and predictors, predict as the program that was trained."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.errors import FleetSparseError, PlanError, SnapshotCorrupt, SnapshotError, TableMismatch
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.models.embedding import distributed
from fleet_sparse.models.zoo import MODELS
from fleet_sparse.serving.exported_rows import RowChoice
from fleet_sparse.serving.model import Tensor, read_model
from fleet_sparse.serving.paddle_export import check_equal, export_paddle
from fleet_sparse.serving.paddle_network import load_network, predict
from fleet_sparse.serving.predictor import Predictor
from fleet_sparse.serving.self_check import TOLERANCE, difference_of
from fleet_sparse.serving.version_predictor import version_predictor
from fleet_sparse.serving.versions import Versions
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.tools.snapshots.reshard import write_full
from fleet_sparse.transpiler import inference
from support.onnx_extra import HAS_ONNX
from support.programs import DIM, flagged, ids_input, linear, minimize, start, weight

EXTREME = np.array([-(2**63), 2**63 - 1, -1, 0, 7])


def pooled(a, **changes):
    return paddle.sum(flagged(a, value=None, **changes), axis=1)


def shared(a, b):
    return pooled(a) + pooled(b)


def padding(a, b):
    return pooled(a, padding_idx=7) + pooled(b)


def computed(a, b):
    return pooled(a * 1000003 + b) + pooled(b, name="other")


def chained(a, b):
    """Ids computed from rows, which cannot be trained: all rows have their first value."""
    ids = paddle.cast(flagged(a) * 4, "int64")[:, :, 0] + a
    return paddle.sum(flagged(ids, "other", 0.25), axis=1) + paddle.sum(flagged(b), axis=1)


def int32(a, b):
    """Ids that are fed as int32, and ids that are cast to it."""
    return pooled(a) + pooled(paddle.cast(b % 1000, "int32"))


def dropout(a, b):
    names = {"weight_attr": "hidden.w", "bias_attr": "hidden.b"}
    hidden = paddle.static.nn.fc(pooled(a) + pooled(b), 4, activation="relu", **names)
    return paddle.nn.functional.dropout(paddle.nn.BatchNorm1D(4)(hidden), 0.5)


def without_dense_weights(a, b):
    return pooled(a) * pooled(b)


def read_twice(a, b):
    """Ops that Paddle's oneDNN lets overwrite an input that another op reads."""
    x = pooled(a) + pooled(b)
    return x + paddle.square(x) + paddle.nn.functional.silu(x) + paddle.cumsum(x, axis=1)


PROGRAMS = [shared, padding, computed, int32, dropout, without_dense_weights, read_twice]


@pytest.fixture(autouse=True)
def directory(plugin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fleet.init()
    yield tmp_path
    fleet.stop_worker()


def inputs_of(program):
    return ids_input((-1, 3), "a", "int32" if program is int32 else "int64"), ids_input((-1, 3), "b")


def as_fed(program, feed):
    """Returns a feed in the dtypes of the program's inputs; an id that is no int32 becomes the nearest one."""
    limits = np.iinfo(np.int32)
    return {**feed, "a": np.clip(feed["a"], limits.min, limits.max).astype(np.int32)} if program is int32 else feed


def feed_of(program, size, rng, ids=EXTREME):
    return as_fed(program, {name: rng.choice(ids, (size, 3)) for name in "ab"})


def saved(program, directory):
    """Trains a program on the ids that are looked up, saves it, and returns executor, evaluation and prediction."""
    with paddle.utils.unique_name.guard():
        a, b = inputs_of(program)
        features = program(a, b)
        prediction = features if program is without_dense_weights else linear(features)
    if program is not chained:
        minimize(paddle.mean(paddle.square(prediction - 1.0)), paddle.optimizer.SGD(1e-3))
    executor = start()
    rng = np.random.default_rng(1)
    pairs = np.repeat(EXTREME, len(EXTREME)), np.tile(EXTREME, len(EXTREME))  # so that each computed id has a row
    every = {name: ids[:, None].repeat(3, 1) for name, ids in zip("ab", pairs, strict=True)}
    for feed in (as_fed(program, every), feed_of(program, 16, rng)):
        executor.run(feed=feed, fetch_list=[])
    fleet.save_inference_model(executor, "serve", ["a", "b"], [prediction])
    return executor, prediction


def evaluated(executor, prediction, feed):
    evaluation = paddle.static.default_main_program().clone(for_test=True)
    (value,) = executor.run(evaluation, feed=feed, fetch_list=[prediction])
    return value


def exported(directory, where="serve/rows", **choice):
    served = directory_at(directory / "serve")
    with open_content(str(directory / where)) as content:
        return export_paddle(served, read_model(served), content, directory / "out", RowChoice(**choice))


def onnx_model(directory, where="serve/rows", **choice):
    """Exports an ONNX model; returns what it predicts, as a function of a feed."""
    from fleet_sparse.serving.onnx_export import export_onnx, run_onnx

    served = directory_at(directory / "serve")
    with open_content(str(directory / where)) as content:
        export_onnx(served, read_model(served), content, directory / "onnx", RowChoice(**choice))
    return lambda feed: run_onnx(directory / "onnx" / "model.onnx", feed)


@pytest.mark.filterwarnings("ignore:When training, we now always track global mean:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_exported_models_predict_as_the_job(directory, program):
    executor, prediction = saved(program, directory)
    with open_content("serve/rows") as content:
        write_full(content, directory_at("resharded"), 3)
    exported(directory, "resharded")
    by_onnx = onnx_model(directory, "resharded") if HAS_ONNX else None
    rng = np.random.default_rng(2)
    for size in (0, 1, 2, 513):
        feed = {name: ids[:, :1].repeat(3, 1) for name, ids in feed_of(program, size, rng).items()}
        expected = evaluated(executor, prediction, feed)
        # oneDNN fails on an empty batch of some ops, batch normalisation among them.
        onednn = (False,) if size == 0 and program is dropout else (None, False)
        ways = [predict(directory / "out" / "model", feed, has_onednn=each)[0] for each in onednn]
        ways += by_onnx(feed) if by_onnx else []
        for found in ways:
            assert difference_of(found, expected) <= TOLERANCE


EVERY = [
    pytest.param(each, id=each.__name__, marks=[] if each in (padding, dropout) else [pytest.mark.slow])
    for each in PROGRAMS
]


@pytest.mark.filterwarnings("ignore:When training, we now always track global mean:UserWarning")
@pytest.mark.parametrize("program", EVERY)
def test_an_evaluation_program_is_served_as_one_that_trains(directory, program):
    """It was built separately and never minimized; ordinary runs have a part of all programs."""
    executor, trained = saved(program, directory)
    built = paddle.static.Program()  # owns `prediction`: values do not keep their program alive
    with paddle.static.program_guard(built, paddle.static.Program()), paddle.utils.unique_name.guard():
        a, b = inputs_of(program)
        features = program(a, b)
        prediction = features if program is without_dense_weights else linear(features)
    evaluation = built.clone(for_test=True)
    fleet.save_inference_model(executor, "serve", ["a", "b"], [prediction], evaluation)
    exported(directory)
    rng = np.random.default_rng(8)
    with predictor_of(directory, 5) as predictor:
        for size in (1, 2, 513):
            feed = {name: ids[:, :1].repeat(3, 1) for name, ids in feed_of(program, size, rng).items()}
            expected = evaluated(executor, trained, feed)
            ways = [predict(directory / "out" / "model", feed, has_onednn=each)[0] for each in (None, False)]
            ways += predictor.run(feed).outputs.values()
            for found in ways:
                assert difference_of(found, expected) <= TOLERANCE


@contextmanager
def predictor_of(directory, num_shards=2, model="serve", **variables):
    """Predicts with read-only pservers of the model."""
    with (
        local_pservers(
            num_shards, root=directory, load_dirname="serve/rows", arguments=["--read-only"], environment=variables
        ) as pservers,
        Predictor(str(directory / model), pservers.endpoints, settings=Settings()) as predictor,
    ):
        yield predictor


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:When training, we now always track global mean:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_version_is_predicted_again_bit_by_bit(directory, program):
    executor, _ = saved(program, directory)
    rng = np.random.default_rng(3)
    feeds = [feed_of(program, size, rng, np.append(EXTREME, rng.integers(0, 99, 9))) for size in (1, 32, 513)]
    answers = []
    with predictor_of(directory, FLEET_SPARSE_VERSION_KEEP_S="0.001") as predictor:
        for number in (1, 2, 3):
            if number > 1:
                executor.run(feed=feed_of(program, 16, rng), fetch_list=[])
                fleet_sparse.save("serve/rows", "delta")
            while predictor.run(feeds[0]).version.number < number:
                assert not predictor.stats().last_failure
            answers.append([predictor.run(feed) for feed in feeds])
    versions = Versions(directory_at(directory / "serve" / "rows"))
    for number, each in enumerate(answers, 1):
        with version_predictor("serve", versions.directory_of(number)) as again:
            for feed, (outputs, version) in zip(feeds, each, strict=True):
                found = again.run(feed)
                assert (found.version, version.number) == (version, number)
                (name,) = outputs
                assert found.outputs[name].tobytes() == outputs[name].tobytes()
    ((first, _), (last, _)) = answers[0][2], answers[2][2]
    assert any(first[name].tobytes() != last[name].tobytes() for name in first)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:When training, we now always track global mean:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_predictor_predicts_as_the_job(directory, program):
    executor, prediction = saved(program, directory)
    rng = np.random.default_rng(2)
    with predictor_of(directory) as predictor:
        for size in (0, 1, 2, 513):
            more = int(rng.integers(0, 2))  # also ids without a row, and both ends of int64
            drawn = feed_of(program, size, rng)
            feed = {name: np.where(np.abs(ids) < 10, ids + more, ids) for name, ids in drawn.items()}
            expected = evaluated(executor, prediction, feed)
            (found,) = predictor.run(feed).outputs.values()
            assert difference_of(found, expected) <= TOLERANCE
        stats = predictor.stats()
        assert (stats.version.number, stats.num_predictions, stats.num_adopted, stats.num_failed) == (1, 4, 1, 0)


@pytest.mark.usefixtures("unchecked")
def test_a_predictor_refuses_ids_computed_from_rows(directory):
    saved(chained, directory)
    with pytest.raises(PlanError), predictor_of(directory, 1):
        pass


@pytest.mark.usefixtures("unchecked")
def test_a_predictor_refuses_pservers_of_another_model(directory):
    saved(computed, directory)
    path = directory / "serve" / "SERVING.json"
    model = read_model(directory_at(directory / "serve"))
    spec = {**model.tables[1].spec, "name": "elsewhere"}
    tables = (model.tables[0], msgspec.structs.replace(model.tables[1], name="elsewhere", spec=spec))
    path.write_bytes(msgspec.structs.replace(model, tables=tables).to_json())
    with pytest.raises(TableMismatch, match="'elsewhere'"), predictor_of(directory, 1):
        pass


def bounded(a, b):
    """Computed ids of a table for ids from 0 to 99; a 99 among `b` leads out of it."""
    ids = a % 50 + paddle.cast(b == 99, "int64") * 1000
    return pooled(ids, name="few", size=[100, DIM], is_distributed=False)


def test_a_computed_id_out_of_its_table_is_named(directory):
    executor, prediction = saved(bounded, directory)
    (lookup,) = read_model(directory_at("serve")).lookups
    assert (lookup.feed, lookup.size) == (None, 100)
    feed = feed_of(bounded, 4, np.random.default_rng(7))
    with Predictor("serve") as predictor:
        (found,) = predictor.run(feed).outputs.values()
        assert difference_of(found, evaluated(executor, prediction, feed)) <= TOLERANCE
        wrong = {"a": np.full((1, 3), 52), "b": np.array([[1, 99, 1]])}
        with pytest.raises(ValueError, match="table 'few': has id 1002, ids should be 0 to 99"):
            predictor.run(wrong)
        assert predictor.stats().num_predictions == 1


@pytest.mark.usefixtures("unchecked")
def test_scheduled_saves_are_followed_by_a_predictor(directory):
    executor, prediction = saved(shared, directory)
    rng = np.random.default_rng(9)
    feed = feed_of(shared, 16, rng)
    fleet_sparse.save_every("serve/rows", steps=2, deltas=1)
    with Predictor("serve") as predictor:
        for number in (2, 3):
            for _ in range(2):
                executor.run(feed=feed_of(shared, 16, rng), fetch_list=[])
            until = time.monotonic() + 30
            while predictor.stats().version.number < number:
                assert time.monotonic() < until, predictor.stats()
                time.sleep(0.01)
            outputs, version = predictor.run(feed)
            (found,) = outputs.values()
            assert difference_of(found, evaluated(executor, prediction, feed)) <= TOLERANCE
            assert version.number == number


RAGGED = {"tags": np.array([3, -1, 7, 7, -(2**63)]), "tags.lengths": np.array([2, 0, 1, 2])}


FIELDS = [
    pytest.param(*each, marks=[] if each in (("sum", False), ("mean", True), ("sqrtn", False)) else [pytest.mark.slow])
    for each in itertools.product(["sum", "mean", "sqrtn"], [False, True])
]


@pytest.mark.parametrize(("combiner", "has_weights"), FIELDS)
def test_fields_of_variable_length_are_exported_and_served(directory, combiner, has_weights):
    """A ragged field and a padded one, which is cut by lengths."""
    tags, tag_lengths = ids_input((-1,), "tags"), ids_input((-1,), "tags.lengths")
    padded, lengths = ids_input((-1, 3), "padded"), ids_input((-1,), "lengths")
    weights = [paddle.static.data("weights", [-1], "float32"), None] if has_weights else None
    pooled_fields = fleet_sparse.pooled_embedding(
        [tags, padded],
        [10**11, DIM],
        combiner,
        lengths=[tag_lengths, lengths],
        weights=weights,
        is_sparse=True,
        is_distributed=True,
        padding_idx=7,
        param_attr=paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform(-0.5, 0.5)),
    )
    prediction = linear(paddle.concat(pooled_fields, axis=1))
    minimize(paddle.mean(paddle.square(prediction - 1.0)), paddle.optimizer.SGD(1e-3))
    executor = start()
    feed = {**RAGGED, "padded": np.array([[3, 7, -1], [7, 7, 7], [2**63 - 1, 3, 3], [-1, 3, 3]])}
    feed |= {"lengths": np.array([3, 3, 1, 0])}
    feed |= {"weights": np.array([0.5, 2, 3, 0, 1], np.float32)} if has_weights else {}
    executor.run(feed=feed, fetch_list=[])
    fleet.save_inference_model(executor, "serve", list(feed), [prediction])
    model = read_model(directory_at("serve"))
    assert model.ragged == (("tags", "weights") if has_weights else ("tags",))
    of_tags = ["tags", "weights"] if has_weights else ["tags"]
    lengths = [("tags.lengths", each) for each in of_tags] + [("lengths", "padded")]
    assert [(each.feed, each.of) for each in model.lengths] == lengths
    exported(directory)
    by_onnx = onnx_model(directory) if HAS_ONNX else None
    one = {name: values[:1] for name, values in feed.items()} | {"tags.lengths": np.array([1])}
    with ExitStack() as stack:
        predictor = stack.enter_context(predictor_of(directory))
        predictors = [predictor]
        predictors += [stack.enter_context(Predictor("serve", engine="onnxruntime"))] if HAS_ONNX else []
        for each in (feed, one):
            expected = evaluated(executor, prediction, each)
            ways = [predict(directory / "out" / "model", each, has_onednn=way)[0] for way in (None, False)]
            ways += by_onnx(each) if by_onnx else []
            ways += [found for other in predictors for found in other.run(each).outputs.values()]
            for found in ways:
                assert difference_of(found, expected) <= TOLERANCE
        for wrong in ({"tags.lengths": np.array([2, 0, 1, 9])}, {"lengths": np.array([3, 3, 1, 4])}):
            with pytest.raises(ValueError, match=repr(next(iter(wrong)))):
                predictor.run({**feed, **wrong})


def test_ids_computed_from_rows_are_exported(directory):
    executor, prediction = saved(chained, directory)
    assert not read_model(directory_at("serve")).is_split
    exported(directory)
    feed = feed_of(chained, 16, np.random.default_rng(4))
    (found,) = predict(directory / "out" / "model", feed)
    assert difference_of(found, evaluated(executor, prediction, feed)) <= TOLERANCE


def zoo_logits(name, batch):
    ids = paddle.static.data("ids", [None, batch.ids.shape[1]], "int64")
    dense = paddle.static.data("dense", [None, batch.dense.shape[1]], "float32")
    network = MODELS[name].network
    return network(ids, dense, embedding=distributed, num_fields=batch.ids.shape[1], dim=DIM, hidden=(8, 8))


def searches_and_ids_of(directory):
    """Returns the number of searches of the plain model, and the names of the parameters that are ids."""
    model = load_network(directory / "out" / "model")
    names = [str(op.name()) for op in model.program.global_block().ops]
    return names.count("pd_op.searchsorted"), [name for name in model.values if name.endswith("@ids")]


@pytest.mark.parametrize(("name", "is_minimized"), [*((name, True) for name in MODELS), ("deepfm", False)])
def test_every_model_of_the_zoo_is_exported_and_served(directory, name, is_minimized):
    batch = MODELS[name].draw(64, seed=1).batch
    with paddle.utils.unique_name.guard():
        logits = zoo_logits(name, batch)
    label = paddle.static.data("label", [None, batch.label.shape[1]], "float32")
    # Small rows: terms that cancel in a logit of DeepFM round to much less than the tolerance.
    minimize(paddle.nn.functional.binary_cross_entropy_with_logits(logits, label), paddle.optimizer.Adagrad(0.01))
    executor = start()
    drawn = {"ids": batch.ids, "dense": batch.dense, "label": batch.label}
    for _ in range(3):
        executor.run(feed=drawn, fetch_list=[])
    # A logit of ESMM is computed from logarithms; onnxruntime's differs by 4e-6, so that its export is refused.
    target = paddle.nn.functional.sigmoid(logits) if name == "esmm" else logits
    if is_minimized:
        fleet.save_inference_model(executor, "serve", ["ids", "dense"], [target])
    else:
        evaluation = paddle.static.Program()
        with paddle.static.program_guard(evaluation, paddle.static.Program()), paddle.utils.unique_name.guard():
            built = zoo_logits(name, batch)
        fleet.save_inference_model(executor, "serve", ["ids", "dense"], [built], evaluation.clone(for_test=True))
    exported(directory)
    by_onnx = onnx_model(directory) if HAS_ONNX else None
    with predictor_of(directory, 3) as predictor:
        for size in (0, 1, 2, 513):
            feed = {each: np.resize(values, (size, values.shape[1])) for each, values in drawn.items()}
            expected = evaluated(executor, target, feed)
            # oneDNN fails on an empty batch of some ops.
            ways = [predict(directory / "out" / "model", feed, has_onednn=way)[0] for way in (None, False)[size == 0 :]]
            ways += by_onnx(feed) if by_onnx else []
            inputs = {each.name: feed[each.name] for each in read_model(directory_at("serve")).feeds}
            for found in (*ways, *predictor.run(inputs).outputs.values()):
                assert difference_of(found, expected) <= TOLERANCE
    fed = {(each.feed, each.padding_idx) for each in read_model(directory_at("serve")).lookups if each.feed}
    if name == "deepfm":  # two tables that were trained with the same ids
        assert searches_and_ids_of(directory) == (len(fed), ["deepfm.w@ids"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("dtype", "bound"), [("float16", 1e-3), ("int8", 3e-2)])
def test_smaller_rows_predict_almost_as_the_job(directory, dtype, bound):
    executor, prediction = saved(shared, directory)
    errors = exported(directory, dtype=dtype)
    feed = feed_of(shared, 64, np.random.default_rng(3))
    (found,) = predict(directory / "out" / "model", feed)
    difference = np.abs(found - evaluated(executor, prediction, feed)).max()
    assert 0 < difference < bound
    assert 0 < errors["emb"].max_error < bound


def around_a_half(a, b):
    """Tables whose first rows have the mean 0.5: a constant, and a uniform distribution."""
    first = paddle.ParamAttr(name="other", initializer=paddle.nn.initializer.Uniform(0.0, 1.0))
    return paddle.sum(flagged(a, value=0.5), axis=1) + paddle.sum(flagged(b, param_attr=first), axis=1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("unseen", "value"), [("mean", 0.5), ("zeros", 0.0)])
def test_an_id_without_a_row_reads_the_unseen_row(directory, unseen, value):
    saved(around_a_half, directory)
    exported(directory, unseen=unseen)
    feed = {"a": np.full((1, 3), 99), "b": np.full((1, 3), 98)}
    ways = predict(directory / "out" / "model", feed)
    ways += onnx_model(directory, unseen=unseen)(feed) if HAS_ONNX else []
    for found in ways:
        assert found.item() == pytest.approx(6 * value * float(weight().sum()))


@pytest.mark.usefixtures("unchecked")
def test_dense_values_are_those_of_the_snapshot(directory):
    executor, prediction = saved(shared, directory)
    for _ in range(3):
        executor.run(feed=feed_of(shared, 8, np.random.default_rng(5)), fetch_list=[])
    fleet.save_persistables(executor, "serve/rows", mode=1)
    feed = feed_of(shared, 16, np.random.default_rng(6))
    expected = evaluated(executor, prediction, feed)
    exported(directory)
    assert difference_of(predict(directory / "out" / "model", feed)[0], expected) <= TOLERANCE


@pytest.mark.usefixtures("unchecked")
def test_an_export_that_predicts_otherwise_is_named(directory, monkeypatch):
    """The saved networks are not protected from oneDNN, and their own check is left out."""
    monkeypatch.setattr(inference, "guard", lambda program, targets: [])
    saved(read_twice, directory)
    (target,) = read_model(directory_at("serve")).targets
    with pytest.raises(FleetSparseError) as failed:
        exported(directory)
    facts = ("--format paddle", repr(target.name), "in default configuration", "at most 1e-06")
    assert [fact for fact in facts if fact not in str(failed.value)] == []
    assert not (directory / "out").exists()


@pytest.mark.usefixtures("unchecked")
def test_the_target_and_the_engine_of_a_fault_are_named(directory):
    saved(shared, directory)
    model = read_model(directory_at("serve"))
    model = msgspec.structs.replace(model, targets=(Tensor("good", "float32", (-1,)), Tensor("bad", "float32", (-1,))))
    wanted = [np.zeros(2), np.array([1.5, 2.5])]
    check_equal("onnx", "onnxruntime's", model, wanted, wanted)
    for found in ([1.5, 2.0], [1.5, np.nan], [1.5]):
        with pytest.raises(FleetSparseError) as failed:
            check_equal("onnx", "onnxruntime's", model, [wanted[0], np.array(found)], wanted)
        facts = ("--format onnx", "'bad'", "in onnxruntime's configuration")
        assert [fact for fact in facts if fact not in str(failed.value)] == []


@pytest.mark.usefixtures("unchecked")
def test_a_damaged_network_is_refused(directory):
    saved(shared, directory)
    path = directory / "serve" / "networks" / "000001" / "forward.pdiparams"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SnapshotCorrupt, match=r"forward.pdiparams"):
        exported(directory)


@pytest.mark.usefixtures("unchecked")
def test_a_missing_partition_is_named(directory):
    saved(shared, directory)
    (directory / "serve" / "rows" / "000001-full" / "shard-0-of-1.fss").unlink()
    with pytest.raises(SnapshotError, match=r"shard-0-of-1.fss"):
        exported(directory)


@pytest.mark.usefixtures("unchecked")
def test_only_rows_of_the_last_days_are_exported(directory):
    executor, _ = saved(shared, directory)
    fleet.save_persistables(executor, "serve/rows", mode=3)
    executor.run(feed={"a": np.full((2, 3), 7), "b": np.full((2, 3), -1)}, fetch_list=[])
    fleet.save_persistables(executor, "serve/rows", mode=1)
    counts = [exported(directory, seen_within_days=days)["emb"].num_rows for days in (0, 1)]
    assert counts == [2, len(EXTREME)]
