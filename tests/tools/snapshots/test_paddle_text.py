"""Imports of checkpoints: those that Paddle 2.6.2 wrote (paddle_2_6), and text in its form that is written here."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.snapshot import row_sort
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.tools.snapshots import paddle_text
from fleet_sparse.tools.snapshots.paddle_import import (
    Imported,
    PaddleDense,
    PaddleTable,
    import_paddle,
    paddle_directories,
)

SAVED_BY_PADDLE = Path(__file__).parent / "paddle_2_6"
OURS = {"naive": "sgd", "adagrad": "adagrad", "std_adagrad": "adagrad", "adam": "adam", "shared_adam": "adam"}
# The model of benchmarks/baselines/paddle_ps.py.
DENSE_SIZES = {"hidden.w_0": 12, "hidden.b_0": 3, "logit.w_0": 3, "logit.b_0": 1}


def spec_of(rule: str = "adagrad", dim: int = 3, **hyperparameters: float) -> TableSpec:
    return TableSpec(
        name="emb", dim=dim, rule=rule, hyperparameters=tuple(hyperparameters.items()), initializer=constant(9.0)
    )


def dense_of(rule: str = "adam", **sizes: int) -> DenseSpec:
    segments, offset = [], 0
    for name, size in sizes.items():
        segments.append(Segment(name, offset, size, 1.0))
        offset += size
    return DenseSpec("dense", rule, (), tuple(segments))


def write(directory: Path, *files: str | bytes, dense: bool = False) -> Path:
    """Files of a table in Paddle's form; the checkpoint's directory."""
    directory.mkdir(parents=True)
    for number, text in enumerate(files):
        name = f"part-{number:03d}.gz" if dense else f"part-000-{number:05d}.gz"
        (directory / name).write_bytes(gzip.compress(text.encode() if isinstance(text, str) else text))
    return directory.parent


def line(identity: int, *numbers: float, unseen: float = 0) -> str:
    """A line of a sparse table."""
    return f"{identity % 2**64} 7 {unseen:g} 0.1 3 1 " + " ".join(f"{number:g}" for number in numbers) + "\n"


def imported(source: Path, spec: TableSpec, target: Path, **options: Any) -> Imported:
    """One table, from directory 000."""
    rule = options.pop("paddle_rule", None)
    return import_paddle(source, directory_at(target), tables=[PaddleTable("000", spec, rule)], **options)


def content_of(target: Path) -> dict[int, tuple[list[float], list[list[float]]]]:
    """Row and states of each id of table "emb"."""
    with open_content(str(target)) as content:
        return {
            int(identity): (row.tolist(), states.tolist())
            for rows in content.rows("emb")
            for identity, row, states in zip(rows.ids, rows.rows, rows.states, strict=True)
        }


def days_of(target: Path) -> dict[int, int]:
    with open_content(str(target)) as content:
        return {
            int(identity): int(day)
            for rows in content.rows("emb")
            for identity, day in zip(rows.ids, rows.columns["last_update_day"], strict=True)
        }


def dense_in(target: Path) -> dict[str, Any]:
    """By name, values and states of each parameter."""
    with open_content(str(target)) as content:
        spec = content.dense["dense"].spec
        values, states = content.dense_values("dense")
        return {
            s.name: (values[s.offset : s.offset + s.size].tolist(), states[:, s.offset : s.offset + s.size].tolist())
            for s in spec.segments
        }


def f32(*numbers: float) -> list[float]:
    return np.array(numbers, np.float32).tolist()


# What Paddle wrote


@pytest.mark.parametrize("rule", OURS)
def test_rows_that_paddle_saved_are_those_of_its_lookups(tmp_path: Path, rule: str) -> None:
    source = SAVED_BY_PADDLE / rule
    found = imported(source, spec_of(OURS[rule], dim=4), tmp_path, num_shards=2)
    assert found.tables[0][:5] == ("emb", "000", rule, 24, 16)
    lookups = json.loads((source / "lookups.json").read_text())
    rows = {identity: row for identity, (row, _) in content_of(tmp_path).items()}
    assert rows.keys() == set(lookups["ids"])
    expected = np.array(lookups["rows"])
    np.testing.assert_allclose([rows[identity] for identity in lookups["ids"]], expected, rtol=5e-6, atol=1e-9)
    assert np.count_nonzero(expected[:, 1:]) == 24  # 8 of the 24 ids were pushed often enough


@pytest.mark.parametrize("rule", OURS)
def test_dense_parameters_of_paddle_are_ordered_by_name(tmp_path: Path, rule: str) -> None:
    dense = PaddleDense("001", dense_of(**DENSE_SIZES), optimizer_step=4)
    source = SAVED_BY_PADDLE / rule
    found = imported(source, spec_of(OURS[rule], dim=4), tmp_path, dense=[dense])
    assert found.dense == (("dense", "001", 19),)
    lines = [
        [float(number) for number in text.split()]
        for path in sorted((source / "001").iterdir())
        for text in gzip.decompress(path.read_bytes()).decode().splitlines()
    ]
    values = dense_in(tmp_path)
    begin = 0
    for name in ("hidden.b_0", "hidden.w_0", "logit.b_0", "logit.w_0"):
        columns = list(zip(*lines[begin : begin + DENSE_SIZES[name]], strict=True))
        assert values[name] == (f32(*columns[0]), [f32(*columns[1]), f32(*columns[2])])
        begin += DENSE_SIZES[name]
    # Biases begin at 0 and every step of Adam moved them by 0.01; weights did not begin at 0.
    assert all(0.02 < abs(value) < 0.045 for value in values["hidden.b_0"][0])


def test_adam_of_paddle_has_moments_of_its_first_gradient(tmp_path: Path) -> None:
    imported(SAVED_BY_PADDLE / "adam", spec_of("adam", dim=4), tmp_path)
    row, (first, second) = content_of(tmp_path)[16]  # pushed once: m = 0.1 g, v = 0.001 g^2
    assert second[0] == pytest.approx(0.001 * (first[0] / 0.1) ** 2, rel=5e-5)
    assert (row[1:], first[1:], second[1:]) == ([0, 0, 0], [0, 0, 0], [0, 0, 0])


def test_most_pushes_of_a_row_are_the_optimizer_step(tmp_path: Path) -> None:
    found = imported(SAVED_BY_PADDLE / "adam", spec_of("adam", dim=4), tmp_path)
    assert found.tables[0].optimizer_step == 4
    assert "Table 'emb': Paddle counts the pushes of each row, 1 to 4; here all rows continue from 4." in found.notes


# State


@pytest.mark.parametrize(
    ("numbers", "spec", "states", "paddle_rule"),
    [
        ((0.25, -0.25), spec_of("sgd"), [], "naive"),
        ((4, 0.25, -0.25, 6), spec_of(initial_accumulator_value=3), [[7, 9, 9]], "adagrad"),
        ((4, 0.25, -0.25, 6, 8), spec_of(), [[4, 6, 8]], "std_adagrad"),
        (
            (1, 2, 0.81, 0.998001, 0.25, -0.25, 3, 4, 5, 6, 0.9, 0.999),
            spec_of("adam"),
            [[1, 3, 4], [2, 5, 6]],
            "adam",
        ),
        ((1, 2, 0.81, 0.998001, 0.25, -0.25, 3, 4, 0.9, 0.999), spec_of("adam"), [[1, 3, 3], [2, 4, 4]], "shared_adam"),
    ],
)
def test_states_of_each_rule_are_ours(
    tmp_path: Path, numbers: Sequence[float], spec: TableSpec, states: list[list[float]], paddle_rule: str
) -> None:
    found = imported(write(tmp_path / "ck/000", line(1, 0.5, *numbers)), spec, tmp_path / "to")
    assert content_of(tmp_path / "to") == {1: ([0.5, 0.25, -0.25], states)}
    assert (found.tables[0].paddle_rule, found.tables[0].days) == (paddle_rule, 0)
    assert any("common state of all values" in note for note in found.notes) is (
        paddle_rule in ("adagrad", "shared_adam")
    )


@pytest.mark.parametrize("pushes", [0, 1, 10, 2000, 50_000])
def test_number_of_pushes_is_found_from_six_digits_of_beta2(tmp_path: Path, pushes: int) -> None:
    power = 0.999 ** (pushes + 1)
    source = write(tmp_path / "ck/000", line(1, 0.5, 1, 2, 0.1, power))
    assert imported(source, spec_of("adam", dim=4), tmp_path / "to").tables[0].optimizer_step == pushes


def test_beta2_that_underflowed_is_many_pushes(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/000", line(1, 0.5, 1, 2, 0, 0))
    step = imported(source, spec_of("adam", dim=4), tmp_path / "to").tables[0].optimizer_step
    assert np.float32(1 - 0.999**step) == 1


def test_the_next_step_of_adagrad_is_as_long_as_paddles(tmp_path: Path) -> None:
    g2sum, initial, learning_rate = np.array([4.0, 6.0, 6.0]), 3.0, 0.05
    source = write(tmp_path / "ck/000", line(1, 0.5, 4, 0.25, -0.25, 6))
    spec = spec_of(initial_accumulator_value=initial, epsilon=0)
    imported(source, spec, tmp_path / "to")
    ((row, states),) = content_of(tmp_path / "to").values()
    ids, grads = np.array([1]), np.array([[1e-3, 2e-3, -1e-3]], np.float32)
    store = TableStore(spec, huge_pages=False)
    store.load(Rows.of(ids, np.array([row], np.float32), np.array([states], np.float32)))
    store.push(ids, grads, learning_rate * math.sqrt(initial), 1)
    after = np.empty((1, 3), np.float32)
    store.pull(ids, after)
    store.close()
    expected = learning_rate * grads[0] * np.sqrt(initial / (initial + g2sum))
    np.testing.assert_allclose(np.array(row) - after[0], expected, rtol=1e-3)


def test_values_that_a_row_lacks_are_0_with_the_first_state(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/000", line(1, 0.5, 4) + line(2, 1, 1, 2, 3, 1))
    found = imported(source, spec_of(initial_accumulator_value=3), tmp_path / "to")
    assert content_of(tmp_path / "to")[1] == ([0.5, 0, 0], [[7, 3, 3]])
    assert found.tables[0].num_short == 1
    assert "1 of 2 rows had only their first value" in " ".join(found.notes)


def test_another_rule_has_initial_states_and_a_note(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/000", line(1, 0.5, 4, 0.25, -0.25, 1, 6))
    found = imported(source, spec_of("adam", dim=4), tmp_path / "to")
    assert content_of(tmp_path / "to") == {1: ([0.5, 0.25, -0.25, 1], [[0] * 4, [0] * 4])}
    assert "Table 'emb': states of Paddle's rule adagrad do not fit adam; they are initial ones now." in found.notes
    assert found.tables[0].optimizer_step == 0


def test_days_since_the_last_push_become_days_of_the_table(tmp_path: Path) -> None:
    text = line(1, 0.5, unseen=0) + line(2, 0.5, unseen=5) + line(3, 0.5, unseen=2)
    imported(write(tmp_path / "ck/000", text), spec_of("sgd"), tmp_path / "to")
    assert days_of(tmp_path / "to") == {1: 5, 2: 0, 3: 3}


def test_values_that_are_not_finite_stay_and_are_counted(tmp_path: Path) -> None:
    text = line(1, 0.5, math.inf) + line(2, math.nan, 4) + line(3, 0.5, 4)
    found = imported(write(tmp_path / "ck/000", text), spec_of(), tmp_path / "to")
    assert content_of(tmp_path / "to")[1][1] == [[math.inf, 0, 0]]
    assert "Table 'emb': 2 rows have values or state that are not finite, and keep them." in found.notes


def test_every_id_of_64_bits_keeps_its_bits(tmp_path: Path) -> None:
    ids = [0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1]
    imported(write(tmp_path / "ck/000", "".join(line(i, 0.5) for i in ids)), spec_of("sgd"), tmp_path / "to")
    assert content_of(tmp_path / "to").keys() == set(ids)


# Numbers


def values_in(path: Path, *texts: str) -> list[float]:
    path.write_text("".join(f"{text}\n" for text in texts))
    return [value for lines in paddle_text.lines_of(path, has_id=False, width=1) for value in lines.values[:, 0]]


@given(
    numbers=st.lists(st.floats(width=32), min_size=1),
    form=st.sampled_from(["%g", "%e", "%f", "%.9g", "%.17g", "%+g", "%G"]),
)
@example(numbers=[1.401298464324817e-45, 3.4028234663852886e38, -0.0, math.inf, -math.inf, math.nan], form="%g")
def test_a_number_is_the_float32_that_is_nearest_to_its_text(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], form: str
) -> None:
    texts = [form % number for number in numbers]
    with np.errstate(over="ignore"):
        expected = np.array(texts, np.float32)
    found = np.array(values_in(tmp_path_factory.getbasetemp() / "numbers", *texts), np.float32)
    np.testing.assert_array_equal(found, expected)
    signed = ~np.isnan(expected)
    assert (np.signbit(found) == np.signbit(expected))[signed].all()


@pytest.mark.parametrize("text", ["", "-", ".", "1e", "1e+", "1x", "in", "0x10", "1  2"])
def test_text_that_is_no_number_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SnapshotCorrupt) as caught:
        values_in(tmp_path / "numbers", "1", text, "1")
    assert caught.value.offset == 2


# Files


@pytest.mark.parametrize("read_bytes", [1, 7, 64, 1000])
def test_lines_are_read_across_the_ends_of_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(paddle_text, "_READ_BYTES", read_bytes)
    monkeypatch.setattr(paddle_text, "_MAX_BATCH_VALUES", 40)
    monkeypatch.setattr(row_sort, "_RUN_BYTES", 1000)
    source = write(tmp_path / "ck/000", "".join(line(k, k, *([] if k % 3 else [1, 2])) for k in range(100)))
    imported(source, spec_of("sgd"), tmp_path / "to")
    assert content_of(tmp_path / "to") == {k: ([k, 0, 0] if k % 3 else [k, 1, 2], []) for k in range(100)}


def test_compressed_streams_that_follow_one_another_are_one_text(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/000", "")
    path = tmp_path / "ck/000/part-000-00000.gz"
    path.write_bytes(gzip.compress(line(1, 0.5)[:9].encode()) + gzip.compress((line(1, 0.5)[9:] + line(2, 1)).encode()))
    imported(source, spec_of("sgd"), tmp_path / "to")
    assert content_of(tmp_path / "to").keys() == {1, 2}


def test_a_table_without_rows_is_imported_as_one(tmp_path: Path) -> None:
    found = imported(write(tmp_path / "ck/000", "", ""), spec_of(), tmp_path / "to")
    assert found.tables[0].num_rows == found.manifest.num_rows == 0
    assert found.manifest.tables == ("emb",)


def test_bytes_read_so_far_are_told_up_to_those_of_all_files(tmp_path: Path) -> None:
    told: list[int] = []
    source = write(tmp_path / "ck/000", line(1, 0.5), line(2, 0.5) + line(3, 0.5))
    write(tmp_path / "ck/001", line(1, 0.5))
    tables = [PaddleTable("000", spec_of("sgd")), PaddleTable("001", replace(spec_of("sgd"), name="other"))]
    import_paddle(source, directory_at(tmp_path / "to"), tables=tables, on_progress=told.append)
    sizes = [path.stat().st_size for path in sorted(source.glob("*/*"))]
    assert sorted(set(told)) == [sizes[0], sizes[0] + sizes[1], sum(sizes)]
    assert sum(each.num_bytes for each in paddle_directories(source)) == sum(sizes)


def test_a_snapshot_of_all_tables_is_complete(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/000", line(1, 0.5))
    write(tmp_path / "ck/001", line(2, 0.5, 1))
    other = TableSpec(name="other", dim=2, rule="sgd", initializer=constant(0.0))
    tables = [PaddleTable("000", spec_of("sgd")), PaddleTable("001", other)]
    whole = import_paddle(source, directory_at(tmp_path / "to"), tables=tables)
    part = import_paddle(source, directory_at(tmp_path / "to"), tables=tables[:1])
    assert (whole.snapshot, whole.manifest.tables, whole.manifest.is_complete) == (
        "000001-full",
        ("emb", "other"),
        True,
    )
    assert (part.snapshot, part.manifest.tables, part.manifest.is_complete) == ("000002-full", ("emb",), False)


# Dense tables


def test_parameters_are_taken_in_the_order_that_is_said(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/001", "1\n2\n", "3\n", dense=True)
    dense = PaddleDense("001", dense_of("sgd", a=1, b=2), order=("b", "a"))
    import_paddle(source, directory_at(tmp_path / "to"), tables=[], dense=[dense])
    assert dense_in(tmp_path / "to") == {"a": ([3], []), "b": ([1, 2], [])}


def test_dense_files_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/001", *(f"{k}\n" for k in range(11)), dense=True)
    (tmp_path / "ck/001/part-010.gz").rename(tmp_path / "ck/001/part-0010.gz")  # sorts before part-002
    dense = PaddleDense("001", dense_of("sgd", a=11))
    import_paddle(source, directory_at(tmp_path / "to"), tables=[], dense=[dense])
    assert dense_in(tmp_path / "to")["a"][0] == list(range(11))


def test_another_dense_rule_has_initial_states_and_a_note(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/001", "1 2 3\n", dense=True)
    dense = PaddleDense("001", dense_of("adagrad", a=1))
    found = import_paddle(source, directory_at(tmp_path / "to"), tables=[], dense=[dense])
    assert dense_in(tmp_path / "to") == {"a": ([1], [[0]])}
    assert found.notes[-1] == ("Dense 'dense': states of Paddle's rule do not fit adagrad; they are initial ones now.")


# What is wrong

GOOD = line(1, 0.5, 0.25, -0.25)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-6])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"hello\n"),
    ],
)
def test_a_damaged_file_is_found_and_nothing_is_written(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    many = "".join(line(k, k * 0.137, k * 0.731, 1 / (k + 1)) for k in range(2, 5000))
    source = write(tmp_path / "ck/000", GOOD, many)
    damage(source / "000/part-000-00001.gz")
    with pytest.raises(SnapshotCorrupt) as caught:
        imported(source, spec_of("sgd"), tmp_path / "to")
    assert caught.value.path == str(source / "000/part-000-00001.gz")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 0 0 0 0 0 0.5 x 1\n", "line 2: 'x' is no number"),
        ("two 0 0 0 0 0 0.5\n", "line 2: 'two' is no id"),
        ("-2 0 0 0 0 0 0.5\n", "line 2: '-2' is no id"),
        ("18446744073709551616 0 0 0 0 0 0.5\n", "line 2: '18446744073709551616' is no id"),
        ("2 0 0 0 0 0 0.5 1\n", "line 2: has 7 numbers behind its id; with rule naive of dim 3 should be 8, or 6"),
        ("2 0 0 0 0 0 0.5 1 2 3\n", "line 2: '3' is a field too many"),
        ("\n", "line 2: it is empty"),
        ("2 0 0 0 0 0 0.5", "line 2: "),
        ("2 0 0.5 0 0 0 0.5\n", "line 2: its second number is not one of days"),
        ("2 0 -1 0 0 0 0.5\n", "line 2: its second number is not one of days"),
        ("2 0 65536 0 0 0 0.5\n", "line 2: its second number is not one of days"),
        ("2 0 nan 0 0 0 0.5\n", "line 2: its second number is not one of days"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_nothing_is_written(tmp_path: Path, text: str, message: str) -> None:
    source = write(tmp_path / "ck/000", GOOD, GOOD.replace("1 ", "3 ", 1) * (paddle_text._SAMPLE_BYTES // 20))
    wrong = gzip.compress((GOOD + text).encode())
    (source / "000/part-000-00000.gz").write_bytes(wrong)
    options = {"paddle_rule": "naive"}
    with pytest.raises((SnapshotCorrupt, SnapshotError)) as caught:
        imported(source, spec_of("sgd"), tmp_path / "to", **options)
    assert message in str(caught.value)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("files", [(GOOD + GOOD,), (GOOD, GOOD)])
@pytest.mark.parametrize("run_bytes", [1, 1 << 20])
def test_an_id_that_occurs_twice_leaves_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Sequence[str], run_bytes: int
) -> None:
    monkeypatch.setattr(row_sort, "_RUN_BYTES", run_bytes)
    source = write(tmp_path / "ck/000", *files)
    (tmp_path / "to").mkdir()
    with pytest.raises(SnapshotCorrupt):
        imported(source, spec_of("sgd"), tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


def test_lines_that_two_rules_may_have_written_need_the_rule(tmp_path: Path) -> None:
    numbers: NDArray[np.float64] = np.arange(1, 17) / 16  # dim 8: std_adagrad 1 + 1 + 7 + 7, shared_adam 1 + 4 + 7 + 4
    source = write(tmp_path / "ck/000", line(1, *numbers))
    with pytest.raises(SnapshotError):
        imported(source, spec_of("momentum", dim=8), tmp_path / "to")
    imported(source, spec_of("momentum", dim=8), tmp_path / "std", paddle_rule="std_adagrad")
    imported(source, spec_of("momentum", dim=8), tmp_path / "shared", paddle_rule="shared_adam")
    assert content_of(tmp_path / "std")[1][0] == [numbers[0], *numbers[2:9]]
    assert content_of(tmp_path / "shared")[1][0] == [numbers[0], *numbers[5:12]]


def test_lines_that_may_be_short_need_the_rule(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/000", line(1, 0.5, 4, 0.25, 0.75, 0.5))  # dim 3: adagrad 2 + 3, adam 5 without embedx
    with pytest.raises(SnapshotError):
        imported(source, spec_of("adam"), tmp_path / "to")
    imported(source, spec_of("adam"), tmp_path / "adagrad", paddle_rule="adagrad")
    imported(source, spec_of("adam"), tmp_path / "adam", paddle_rule="adam")
    assert content_of(tmp_path / "adagrad")[1] == ([0.5, 0.25, 0.75], [[0, 0, 0], [0, 0, 0]])
    assert content_of(tmp_path / "adam")[1] == ([0.5, 0, 0], [[4, 0, 0], [0.25, 0, 0]])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["part-000-00000.gz", "part-000-00002.gz"], "numbered from 0 without a gap. Is one missing"),
        (["part-000-00001.gz"], "numbered from 0 without a gap. Is one missing"),
        (["part-000-00000.gz", "part-001-00000.gz"], "or are two saves mixed"),
        (["part-000-00000.gz", "part-000-00000"], "or are two saves mixed"),
        (["part-000-00000.gz", "part-001.gz"], "or are two saves mixed"),
        (["part-slot-000-00000"], "part-slot-000-00000 is no file of a table"),
        ([], "it has no file of a table"),
    ],
)
def test_files_that_are_not_those_of_one_table_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    (tmp_path / "ck/000").mkdir(parents=True)
    for name in names:
        (tmp_path / "ck/000" / name).write_bytes(gzip.compress(b""))
    with pytest.raises(SnapshotError, match=message):
        imported(tmp_path / "ck", spec_of(), tmp_path / "to")


def test_pyarrow_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "ck/000", GOOD)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SnapshotError):
        imported(source, spec_of("sgd"), tmp_path / "to")


@pytest.mark.parametrize(
    ("spec", "paddle_rule", "directory"),
    [
        (spec_of(dim=4), None, "000"),
        (spec_of(), "naive", "000"),
        (spec_of("adam"), "adam", "000"),
        (spec_of(), None, "001"),
    ],
    ids=["dim", "rule", "powers of beta", "directory"],
)
def test_a_table_that_does_not_fit_is_refused(
    tmp_path: Path, spec: TableSpec, paddle_rule: str | None, directory: str
) -> None:
    source = write(tmp_path / "ck/000", line(1, 0.5, 4, 0.25, -0.25, 6))
    with pytest.raises(SnapshotError):
        import_paddle(source, directory_at(tmp_path / "to"), tables=[PaddleTable(directory, spec, paddle_rule)])


@pytest.mark.parametrize("dense", [dense_of(a=2), dense_of("sgd", a=3)], ids=["no step", "size"])
def test_dense_parameters_that_do_not_fit_are_refused(tmp_path: Path, dense: DenseSpec) -> None:
    source = write(tmp_path / "ck/001", "1 2 3\n" * 2, dense=True)
    with pytest.raises(SnapshotError):
        import_paddle(source, directory_at(tmp_path / "to"), tables=[], dense=[PaddleDense("001", dense)])


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SnapshotError):
        paddle_directories(tmp_path / name)


def test_kinds_of_tables_are_not_mixed_up(tmp_path: Path) -> None:
    source = write(tmp_path / "ck/000", GOOD)
    write(tmp_path / "ck/001", "1\n", dense=True)
    target = directory_at(tmp_path / "to")
    with pytest.raises(SnapshotError):
        import_paddle(source, target, tables=[PaddleTable("001", spec_of())])
    with pytest.raises(SnapshotError):
        import_paddle(source, target, tables=[], dense=[PaddleDense("000", dense_of(a=1), 1)])


@pytest.mark.parametrize(
    ("tables", "dense", "message"),
    [
        ([], [], "nothing to import"),
        ([PaddleTable("000", spec_of()), PaddleTable("001", spec_of())], [], "'emb' is given twice"),
        ([PaddleTable("000", spec_of())], [PaddleDense("000", dense_of(a=1), 1)], "'000' is given twice"),
        ([PaddleTable("000", spec_of(), "sgd")], [], "rule 'sgd', should be one of naive, adagrad, std_adagrad"),
        ([], [PaddleDense("001", dense_of(a=1, b=1), 1, ("a",))], "order should name each of a, b once"),
        ([], [PaddleDense("001", dense_of(a=1), -1)], "optimizer step is -1"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    tmp_path: Path, tables: list[PaddleTable], dense: list[PaddleDense], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        import_paddle(tmp_path, directory_at(tmp_path / "to"), tables=tables, dense=dense)
