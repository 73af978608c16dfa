"""`exe.train_from_dataset` and `exe.infer_from_dataset` over Paddle's own data sets, the pserver in this process."""

from __future__ import annotations

import gzip
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import Barrier, Lock, Thread, get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest
from paddle.base.executor import FetchHandler

import fleet_sparse
from fleet_sparse.errors import DatasetError, PlanError
from support.programs import flagged, linear, minimize, start

NUM_IDS = 3
IN_MEMORY, QUEUE = paddle.distributed.InMemoryDataset, paddle.distributed.QueueDataset

Feed = dict[str, np.ndarray]

NOTING = Lock()


class Recorder(paddle.static.Executor):
    """An executor that notes the feeds and the first fetched value of each step."""

    def __init__(self) -> None:
        super().__init__(paddle.CPUPlace())
        self.feeds: list[Feed] = []
        self.values: list[bytes] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        results = super().run(*args, **kwargs)
        with NOTING:
            self.feeds.append({name: array.copy() for name, array in kwargs["feed"].items()})
            self.values += [np.array(value).tobytes() for value in results[:1]]
        return results


def inputs() -> list[Any]:
    return [
        paddle.static.data("ids", [-1, NUM_IDS], "int64"),
        paddle.static.data("dense", [-1, 2], "float32"),
        paddle.static.data("label", [-1, 1], "float32"),
    ]


def model() -> tuple[list[Any], Any]:
    """Inputs and loss of a model with a table and a dense layer."""
    ids, dense, label = slots = inputs()
    features = paddle.concat([paddle.sum(flagged(ids, "items", None), axis=1), dense], axis=1)
    return slots, paddle.nn.functional.binary_cross_entropy_with_logits(linear(features), label)


def trained() -> tuple[list[Any], Any]:
    """Inputs and loss of the model, minimized; worker and pserver have started."""
    fleet.init()
    slots, loss = model()
    minimize(loss, paddle.optimizer.Adagrad(0.1))
    start()
    return slots, loss


@contextmanager
def another_job() -> Iterator[Any]:
    """Makes a new program the default one, of a session of its own."""
    fleet_sparse.uninstall()
    fleet_sparse.install()
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(scope), paddle.utils.unique_name.guard():
        yield main


def examples(num_lines: int, seed: int = 0) -> Feed:
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, 40, (num_lines, NUM_IDS)),
        "dense": rng.random((num_lines, 2), np.float32),
        "label": rng.integers(0, 2, (num_lines, 1)).astype(np.float32),
    }


def line_of(arrays: Sequence[Any]) -> str:
    return " ".join(f"{len(array)} {' '.join(map(str, array))}".strip() for array in arrays)


def written(path: Path, feed: Feed) -> str:
    """A file with these examples."""
    text = "".join(line_of(row) + "\n" for row in zip(*(array.tolist() for array in feed.values()), strict=True))
    path.write_text(text)
    return str(path)


def files(directory: Path, sizes: Sequence[int]) -> list[str]:
    return [written(directory / f"part-{number}", examples(size, number)) for number, size in enumerate(sizes)]


def dataset_of(kind: Any, paths: Sequence[str], slots: Sequence[Any], **settings: Any) -> Any:
    dataset = kind()
    dataset.init(**{"batch_size": 4, "thread_num": 1, "use_var": slots, **settings})
    dataset.set_filelist(list(paths))
    if isinstance(dataset, IN_MEMORY):
        dataset.load_into_memory()
    return dataset


def joined(sizes: Sequence[int]) -> Feed:
    parts = [examples(size, number) for number, size in enumerate(sizes)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def batches(feed: Feed, size: int) -> list[Feed]:
    num_lines = len(feed["ids"])
    return [{name: array[at : at + size] for name, array in feed.items()} for at in range(0, num_lines, size)]


def lines_of(feed: Feed) -> Iterator[tuple[list[int], list[float]]]:
    return zip(feed["ids"].tolist(), feed["dense"].tolist(), strict=True)


def same(found: Sequence[Feed], expected: Sequence[Feed]) -> None:
    assert [feed.keys() for feed in found] == [feed.keys() for feed in expected]
    for one, other in zip(found, expected, strict=True):
        for name, array in one.items():
            assert (array.dtype, array.tolist()) == (other[name].dtype, other[name].tolist())


@pytest.mark.parametrize("kind", [IN_MEMORY, QUEUE])
def test_losses_are_those_of_a_loop_over_the_same_batches(plugin, tmp_path, kind):
    slots, loss = trained()
    dataset = dataset_of(kind, files(tmp_path, [9, 2, 0, 6]), slots)
    executor = Recorder()
    for _ in range(2):
        executor.train_from_dataset(paddle.static.default_main_program(), dataset, fetch_list=[loss], fetch_info=["l"])
    fleet.stop_worker()
    same(executor.feeds, batches(joined([9, 2, 0, 6]), 4) * 2)

    with another_job() as program:
        _, loss = trained()
        plain = [executor.run(program, feed=feed, fetch_list=[loss])[0].tobytes() for feed in list(executor.feeds)]
        fleet.stop_worker()
    assert len(set(plain)) == len(plain) == 10
    assert executor.values[: len(plain)] == plain


def test_a_program_without_fleet_is_trained_too(plugin, tmp_path):
    slots = inputs()
    loss = paddle.mean(paddle.square(linear(slots[1]) - slots[2]))
    paddle.optimizer.SGD(0.1).minimize(loss)
    dataset = dataset_of(QUEUE, files(tmp_path, [8]), slots)
    executor = Recorder()
    executor.run(paddle.static.default_startup_program(), feed={})
    executor.train_from_dataset(dataset=dataset, fetch_list=[loss], fetch_info=["loss"])
    assert len(set(executor.values)) == 2
    # Inputs that the program does not have are not fed.
    assert [set(feed) for feed in executor.feeds[1:]] == [{"ids", "dense", "label"}] * 2


@pytest.mark.parametrize("kind", ["InMemoryDataset", "QueueDataset"])
def test_data_sets_of_the_factory_are_read_as_the_others(slots, tmp_path, kind):
    dataset = paddle.base.DatasetFactory().create_dataset(kind)
    dataset.set_use_var(slots)
    dataset.set_batch_size(4)
    dataset.set_thread(1)
    dataset.set_pipe_command("head -5")
    dataset.set_filelist(numbered(tmp_path, [9, 2]))
    if kind == "InMemoryDataset":
        dataset.load_into_memory()
        assert dataset.get_memory_data_size() == 7
    assert read(dataset) == [[0, 1, 2, 3], [4, 100, 101]]


def test_data_sets_of_other_kinds_are_refused_by_name(slots, tmp_path):
    for make in (paddle.distributed.fleet.FileInstantDataset, paddle.base.dataset.FileInstantDataset):
        with pytest.raises(PlanError, match="FileInstantDataset"):
            read(make())
    with pytest.raises(PlanError, match="tdm_sample"):
        IN_MEMORY().tdm_sample("tree", "path", [1], 0, False, 0, 0)
    with pytest.raises(PlanError, match="'small'"):
        paddle.base.DatasetFactory().create_dataset().set_use_var([paddle.static.data("small", [-1, 1], "int32")])


def test_infer_from_dataset_trains_nothing(plugin, tmp_path):
    slots, loss = trained()
    dataset = dataset_of(QUEUE, files(tmp_path, [8]), slots)
    executor, program = Recorder(), paddle.static.default_main_program()
    executor.train_from_dataset(program, dataset, fetch_list=[loss], fetch_info=["loss"])
    for _ in range(2):
        executor.infer_from_dataset(program, dataset, fetch_list=[loss], fetch_info=["loss"])
    trained_first, _, *evaluated = executor.values
    assert evaluated[:2] == evaluated[2:]
    assert evaluated[0] != trained_first
    fleet.stop_worker()


def test_data_sets_of_the_factory_train_as_others(plugin, tmp_path):
    slots, loss = trained()
    executor, program = Recorder(), paddle.static.default_main_program()
    for kind in ("InMemoryDataset", "QueueDataset"):
        dataset = paddle.base.DatasetFactory().create_dataset(kind)
        dataset.set_use_var(slots)
        dataset.set_batch_size(4)
        dataset.set_filelist(files(tmp_path, [9]))
        if kind == "InMemoryDataset":
            dataset.load_into_memory()
            assert dataset.get_memory_data_size() == 9
        executor.train_from_dataset(program, dataset, fetch_list=[loss], fetch_info=["loss"])
    same(executor.feeds, batches(joined([9]), 4) * 2)
    fleet.stop_worker()


# Dumped fields


def dumped(directory: Path) -> list[list[str]]:
    """The fields of each line of a dump; a line begins with an empty one."""
    lines = (directory / "part-00000-00000").read_text().splitlines()
    return [line.split("\t") for line in lines]


@pytest.mark.parametrize("is_in_strategy", [True, False])
def test_fields_of_each_example_are_dumped(plugin, tmp_path, is_in_strategy):
    fleet.init()
    slots, loss = model()
    wide = paddle.scale(slots[1], 2.0)
    options = {"dump_fields": ["ids", wide.name], "dump_fields_path": str(tmp_path / "dump")}
    strategy = fleet.DistributedStrategy()
    if is_in_strategy:
        strategy.trainer_desc_configs = options
    fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.1), strategy).minimize(loss)
    start()
    program = paddle.static.default_main_program()
    if not is_in_strategy:
        program._fleet_opt.update(options)
    dataset = dataset_of(QUEUE, files(tmp_path, [5]), slots)
    executor = Recorder()
    for run in (executor.train_from_dataset, executor.infer_from_dataset):
        run(program, dataset)
        lines = dumped(tmp_path / "dump")
        expected = examples(5)
        assert [line[:2] for line in lines] == [["", f"ids:3:{a}:{b}:{c}"] for a, b, c in expected["ids"].tolist()]
        values = [[float(value) for value in line[2].split(":")[2:]] for line in lines]
        np.testing.assert_allclose(values, 2 * expected["dense"], rtol=1e-6)
    fleet.stop_worker()


def test_fields_that_cannot_be_dumped_are_refused(plugin, tmp_path):
    slots, loss = trained()
    program, dataset = paddle.static.default_main_program(), dataset_of(QUEUE, files(tmp_path, [5]), slots)
    for fields, path, says in (
        (["ids"], "afs:/dump", "'afs:/dump'"),
        (["nothing"], str(tmp_path), "'nothing'"),
        ([loss.name], str(tmp_path), re.escape(loss.name)),
    ):
        program._fleet_opt = {"dump_fields": fields, "dump_fields_path": path}
        with pytest.raises(PlanError, match=says):
            Recorder().train_from_dataset(program, dataset)
    fleet.stop_worker()


# Order


def ids_of(executor: Recorder) -> list[list[int]]:
    return [feed["ids"][:, 0].tolist() for feed in executor.feeds]


def numbered(directory: Path, sizes: Sequence[int]) -> list[str]:
    """Files whose lines are numbered: 0, 1, ... in the first one, 100, 101, ... in the second one."""
    paths = []
    for number, size in enumerate(sizes):
        ids = np.repeat(np.arange(size)[:, None] + 100 * number, NUM_IDS, axis=1)
        paths.append(written(directory / f"numbered-{number}", {**examples(size), "ids": ids}))
    return paths


def read(dataset: Any, **arguments: Any) -> list[list[int]]:
    executor = Recorder()
    executor.train_from_dataset(paddle.static.default_main_program(), dataset, **arguments)
    return ids_of(executor)


@pytest.fixture
def slots(plugin):
    """The inputs of a program that does nothing."""
    return inputs()


def test_one_thread_reads_batches_across_files_in_order(slots, tmp_path):
    dataset = dataset_of(QUEUE, numbered(tmp_path, [3, 2, 4]), slots)
    assert read(dataset) == [[0, 1, 2, 100], [101, 200, 201, 202], [203]]


def test_threads_take_every_nth_file_and_turns(slots, tmp_path):
    paths = numbered(tmp_path, [5, 9, 2])
    expected = [[0, 1, 2, 3], [100, 101, 102, 103], [4, 200, 201], [104, 105, 106, 107], [108]]
    for _ in range(3):
        assert read(dataset_of(QUEUE, paths, slots, thread_num=2)) == expected
    assert read(dataset_of(QUEUE, paths, slots), thread=2) == expected


def test_loaded_lines_are_in_the_order_of_the_files(slots, tmp_path):
    paths = numbered(tmp_path, [3, 6, 1, 4])
    orders = [read(dataset_of(IN_MEMORY, paths, slots, thread_num=threads)) for threads in (1, 3)]
    assert orders[0] == orders[1]
    assert list(chain(*orders[0])) == [0, 1, 2, *range(100, 106), 200, *range(300, 304)]


def test_local_shuffle_depends_on_seed_and_number_of_shuffles(slots, tmp_path):
    paths = numbered(tmp_path, [50])
    orders = []
    for _ in range(2):
        dataset = dataset_of(IN_MEMORY, paths, slots)
        for _ in range(2):
            dataset.local_shuffle()
            orders.append(list(chain(*read(dataset))))
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]
    assert all(sorted(order) == list(range(50)) != order for order in orders)


# Threads that train


class Concurrent(Recorder):
    """Notes the threads of its steps, of which the second one waits until another thread runs one, too."""

    def __init__(self, num_threads: int) -> None:
        super().__init__()
        self.meeting = Barrier(num_threads)
        self.met: set[int] = set()
        self.is_met = False
        self.fed_and_fetched: list[tuple[Any, Any]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        if self.feeds and not self.is_met and thread not in self.met:
            self.met.add(thread)
            self.meeting.wait(10)
        results = super().run(*args, **kwargs)
        self.fed_and_fetched.append((kwargs["feed"]["dense"].tolist(), np.array(results[1]).tolist()))
        return results


@pytest.mark.parametrize("kind", [IN_MEMORY, QUEUE])
def test_async_training_runs_thread_num_batches_at_once(plugin, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    slots, loss = trained()
    dataset = dataset_of(kind, files(tmp_path, [40, 31]), slots, thread_num=2)
    executor = Concurrent(2)
    for _ in range(2):
        executor.train_from_dataset(None, dataset, fetch_list=[loss, slots[1]], fetch_info=["loss", "dense"])
        executor.is_met = True
    fleet.stop_worker()
    assert [fed for fed, _ in executor.fed_and_fetched] == [fetched for _, fetched in executor.fed_and_fetched]
    assert len(executor.met) == 2
    lines = Counter(str([*ids, *dense]) for feed in executor.feeds for ids, dense in lines_of(feed))
    assert lines == Counter(str([*ids, *dense]) for ids, dense in lines_of(joined([40, 31])) for _ in range(2))
    losses = [np.frombuffer(value, np.float32).item() for value in executor.values]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-9:]) < np.mean(losses[:9])


def test_batches_that_run_at_once_have_their_own_values(plugin, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    fleet.init()
    slots, loss = model()
    minimize(loss, paddle.optimizer.SGD(0.0))
    start()
    dataset = dataset_of(IN_MEMORY, files(tmp_path, [400]), slots)
    losses = []
    for num_threads in (1, 4):
        executor = Recorder()
        executor.train_from_dataset(None, dataset, fetch_list=[loss], fetch_info=["loss"], thread=num_threads)
        by_batch = zip((feed["dense"].tobytes() for feed in executor.feeds), executor.values, strict=True)
        losses.append(dict(by_batch))
    fleet.stop_worker()
    assert losses[0] == losses[1]
    assert len(losses[0]) == 100


def test_sync_training_runs_one_batch_at_a_time(plugin, tmp_path):
    fleet.init()
    slots, loss = model()
    minimize(loss, paddle.optimizer.Adagrad(0.1), is_async=False)
    start()
    dataset = dataset_of(IN_MEMORY, files(tmp_path, [8, 9]), slots, thread_num=2)
    executor = Recorder()
    executor.train_from_dataset(None, dataset, fetch_list=[loss], fetch_info=["loss"])
    fleet.stop_worker()
    same(executor.feeds, batches(joined([8, 9]), 4))


def test_an_error_on_a_thread_that_trains_is_raised(plugin, tmp_path):
    slots, loss = trained()
    paths = files(tmp_path, [40, 40])
    with open(paths[1], "a") as file:
        file.write("3 1 2 x 2 0 0 1 1\n")
    executor = Recorder()
    with pytest.raises(DatasetError) as caught:
        executor.train_from_dataset(None, dataset_of(QUEUE, paths, slots, thread_num=2), fetch_list=[loss])
    assert (caught.value.path, caught.value.line_number) == (paths[1], 41)
    fleet.stop_worker()


# Memory


def test_sizes_are_those_of_what_is_loaded(slots, tmp_path):
    dataset = dataset_of(IN_MEMORY, numbered(tmp_path, [3, 4]), slots)
    assert (dataset.get_memory_data_size(), dataset.get_shuffle_data_size()) == (7, 7)
    dataset.release_memory()
    assert dataset.get_memory_data_size() == 0
    dataset.set_filelist(numbered(tmp_path, [2]))
    dataset.preload_into_memory()
    dataset.wait_preload_done()
    assert dataset.get_memory_data_size() == 2


def test_what_is_not_loaded_is_not_read(slots, tmp_path):
    dataset = IN_MEMORY()
    dataset.init(batch_size=4, use_var=slots)
    with pytest.raises(PlanError, match="load_into_memory"):
        read(dataset)
    with pytest.raises(PlanError, match="load_into_memory"):
        dataset.local_shuffle()
    with pytest.raises(PlanError, match="preload_into_memory"):
        dataset.wait_preload_done()


def test_a_second_load_is_refused_until_memory_is_released(slots, tmp_path):
    dataset = dataset_of(IN_MEMORY, numbered(tmp_path, [3]), slots)
    with pytest.raises(PlanError, match=r"3 lines.*release_memory"):
        dataset.load_into_memory()
    dataset.release_memory()
    dataset.load_into_memory(is_shuffle=True)
    assert dataset.get_memory_data_size() == 3


# Commands


def test_pipe_command_writes_the_text(slots, tmp_path):
    script = tmp_path / "reader.py"
    script.write_text(
        "import paddle.distributed.fleet as fleet\n"
        "class Reader(fleet.MultiSlotDataGenerator):\n"
        "    def generate_sample(self, line):\n"
        "        def samples():\n"
        "            number = int(line)\n"
        "            yield [('ids', [number] * 3), ('dense', [0.5, 1.0]), ('label', [1.0])]\n"
        "        return samples\n"
        "Reader().run_from_stdin()\n"
    )
    source = tmp_path / "numbers"
    source.write_text("".join(f"{number}\n" for number in range(6)))
    dataset = dataset_of(QUEUE, [str(source)], slots, pipe_command=f"{sys.executable} {script} 2>/dev/null")
    assert read(dataset) == [[0, 1, 2, 3], [4, 5]]


def test_pipe_command_may_be_a_pipeline(slots, tmp_path):
    (path,) = numbered(tmp_path, [4])
    assert read(dataset_of(QUEUE, [path], slots, pipe_command="cat | head -2; cat")) == [[0, 1]]


def test_gz_files_are_decompressed(slots, tmp_path):
    (path,) = numbered(tmp_path, [3])
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert read(dataset_of(QUEUE, [str(packed)], slots)) == [[0, 1, 2]]
    assert read(dataset_of(IN_MEMORY, [str(packed)], slots, pipe_command="head -2")) == [[0, 1]]


def test_a_command_may_stop_reading(slots, tmp_path):
    (path,) = numbered(tmp_path, [70_000])
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes(), 1))
    assert read(dataset_of(QUEUE, [str(packed)], slots, pipe_command="head -n 1")) == [[0]]


def test_download_command_gets_the_path(slots, tmp_path):
    (path,) = numbered(tmp_path, [3])
    assert read(dataset_of(QUEUE, [path], slots, download_cmd="head -n 2")) == [[0, 1]]


def test_last_line_needs_no_newline(slots, tmp_path):
    (path,) = numbered(tmp_path, [3])
    Path(path).write_text(Path(path).read_text().rstrip("\n"))
    assert read(dataset_of(QUEUE, [path], slots)) == [[0, 1, 2]]


def test_files_larger_than_a_chunk_are_read_whole(slots, tmp_path):
    paths = numbered(tmp_path, [70_000])
    for command in ("cat", "cat -"):
        dataset = dataset_of(QUEUE, paths, slots, batch_size=30_000, pipe_command=command)
        assert list(chain(*read(dataset))) == list(range(70_000))


def test_words_before_the_slots_are_left_out(slots, tmp_path):
    (path,) = numbered(tmp_path, [2])
    named = tmp_path / "named"
    named.write_text("".join(f"1 user-{line}\n" for line in Path(path).read_text().splitlines()).replace("-", "-7 "))
    dataset = IN_MEMORY()
    dataset.init(batch_size=4, use_var=slots)
    dataset.update_settings(parse_ins_id=True)
    dataset.set_filelist([str(named)])
    dataset.load_into_memory()
    assert read(dataset) == [[0, 1]]


# Shapes


def ragged_file(directory: Path) -> str:
    path = directory / "ragged"
    path.write_text("1 7 2 0.5 1.5\n3 1 2 3 1 2.5\n0 3 4.5 5.5 6.5\n")
    return str(path)


def feeds_of(slots: Sequence[Any], path: str, **settings: Any) -> list[Feed]:
    executor = Recorder()
    executor.train_from_dataset(dataset=dataset_of(QUEUE, [path], slots, **settings))
    return executor.feeds


def test_an_unknown_dimension_is_padded_with_zeros(plugin, tmp_path):
    slots = [paddle.static.data("tags", [-1, -1], "int64"), paddle.static.data("weights", [-1, -1, 1], "float32")]
    (feed,) = feeds_of(slots, ragged_file(tmp_path))
    assert feed["tags"].tolist() == [[7, 0, 0], [1, 2, 3], [0, 0, 0]]
    assert feed["weights"].tolist() == [[[0.5], [1.5], [0]], [[2.5], [0], [0]], [[4.5], [5.5], [6.5]]]


def test_an_input_for_lengths_gets_values_and_lengths(plugin, tmp_path):
    slots = [paddle.static.data("tags", [-1, 1], "int64"), paddle.static.data("weights", [-1, -1], "float32")]
    for name in ("tags.lengths", "weights.lengths"):
        paddle.static.data(name, [-1], "int64")
    (feed,) = feeds_of(slots, ragged_file(tmp_path))
    assert feed["tags"].tolist() == [[7], [1], [2], [3]]
    assert feed["tags.lengths"].tolist() == [1, 3, 0]
    assert feed["weights"].tolist() == [[0.5, 1.5, 0], [2.5, 0, 0], [4.5, 5.5, 6.5]]
    assert feed["weights.lengths"].tolist() == [2, 1, 3]


def test_a_line_that_does_not_fit_a_shape_is_named(plugin, tmp_path):
    slots = [paddle.static.data("tags", [-1, 1], "int64"), paddle.static.data("weights", [-1, -1], "float32")]
    with pytest.raises(DatasetError) as caught:
        feeds_of(slots, path := ragged_file(tmp_path))
    error = caught.value
    assert (error.path, error.line_number, error.slot) == (path, 2, "tags")
    for name in ("has 3 values", "should have 1", "[-1, -1]", "'tags.lengths'"):
        assert name in str(error)


# What a run reports


def test_fetched_values_are_printed_each_period(plugin, tmp_path, capsys):
    slots, loss = trained()
    dataset = dataset_of(QUEUE, files(tmp_path, [24]), slots)
    executor = Recorder()
    executor.train_from_dataset(
        None, dataset, fetch_list=[loss, slots[2]], fetch_info=["loss", "label"], print_period=2, debug=True
    )
    printed = capsys.readouterr().out
    pattern = r"^time: \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\], batch: \[(\d+)\], loss: \[([\d.]+)\], label: \[[01,]+\]$"
    found = re.findall(pattern, printed, re.MULTILINE)
    assert [number for number, _ in found] == ["2", "4", "6"]
    losses = [np.frombuffer(value, np.float32).item() for value in executor.values]
    assert [float(text) for _, text in found] == pytest.approx(losses[1::2], rel=1e-5)
    assert re.search(r"exe.train_from_dataset: 24 examples in 6 batches", printed)
    fleet.stop_worker()


def test_a_fetch_handler_gets_its_values(plugin, tmp_path):
    slots, loss = trained()
    dataset = dataset_of(QUEUE, files(tmp_path, [8]), slots)
    handled = []

    class Handler(FetchHandler):
        def handler(self, values):
            handled.append(values["loss"].tobytes())

    executor = Recorder()
    executor.train_from_dataset(
        None, dataset, fetch_handler=Handler({"loss": loss}, period_secs=0), fetch_list=[loss], fetch_info=["loss"]
    )
    assert handled == executor.values
    fleet.stop_worker()


# Errors


def test_a_step_before_a_malformed_line_has_run(plugin, tmp_path):
    slots, loss = trained()
    (path,) = files(tmp_path, [6])
    with open(path, "a") as file:
        file.write("3 1 2 x 2 0 0 1 1\n")
    executor = Recorder()
    with pytest.raises(DatasetError) as caught:
        executor.train_from_dataset(None, dataset_of(QUEUE, [path], slots), fetch_list=[loss])
    assert (caught.value.path, caught.value.line_number, caught.value.slot) == (path, 7, "ids")
    same(executor.feeds, batches(joined([6]), 4)[:1])
    assert len(executor.values) == 1
    fleet.stop_worker()


@pytest.mark.parametrize("kind", [IN_MEMORY, QUEUE])
def test_a_command_that_fails_is_named_with_its_file(slots, tmp_path, kind):
    paths = numbered(tmp_path, [2, 2])
    with pytest.raises(DatasetError, match=r"'exit 3'.*status 3") as caught:
        read(dataset_of(kind, paths, slots, pipe_command="exit 3"))
    assert caught.value.path == paths[0]


def test_a_command_that_is_killed_is_named_with_its_signal(slots, tmp_path):
    with pytest.raises(DatasetError, match="signal 9"):
        read(dataset_of(QUEUE, numbered(tmp_path, [2]), slots, pipe_command="cat; kill -9 $$"))


def test_a_missing_file_is_named(slots, tmp_path):
    with pytest.raises(DatasetError) as caught:
        read(dataset_of(QUEUE, [str(tmp_path / "gone")], slots))
    assert caught.value.path == str(tmp_path / "gone")


@pytest.mark.parametrize("command", ["sleep 100", "exec 1>&-; sleep 100"])
def test_a_silent_command_is_ended_at_its_deadline(slots, tmp_path, monkeypatch, command):
    from fleet_sparse.plugin import active_session

    monkeypatch.setenv("FLEET_SPARSE_PIPE_S", "0.2")
    active_session.forget()
    begun_at = time.monotonic()
    with pytest.raises(DatasetError, match=r"0.2 s.*FLEET_SPARSE_PIPE_S"):
        read(dataset_of(QUEUE, numbered(tmp_path, [2]), slots, pipe_command=command))
    assert time.monotonic() - begun_at < 10
    active_session.forget()


def test_commands_end_when_a_step_fails(slots, tmp_path):
    flag = tmp_path / "alive"
    dataset = dataset_of(
        QUEUE, numbered(tmp_path, [9000]), slots, pipe_command=f"echo $$ > {flag}; cat; sleep 100", batch_size=1
    )

    class Failing(Recorder):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            while not flag.exists() or not flag.read_text():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Failing().train_from_dataset(None, dataset)
    with pytest.raises(ProcessLookupError):
        os.kill(int(flag.read_text()), 0)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"merge_by_lineid": True}, "merge_size"),
        ({"fea_eval": True}, "fea_eval"),
        ({"filelist": ["hdfs:/a"]}, "hdfs:/a"),
    ],
)
def test_settings_that_are_not_supported_are_refused(slots, tmp_path, settings, name):
    dataset = IN_MEMORY()
    dataset.init(batch_size=4, use_var=slots)
    for field, value in settings.items():
        setattr(dataset, field, value)
    with pytest.raises(PlanError, match=name):
        dataset.load_into_memory()


def test_arguments_that_are_not_supported_are_refused(slots, tmp_path):
    executor, dataset = Recorder(), dataset_of(QUEUE, numbered(tmp_path, [2]), slots)
    program = SimpleNamespace()
    with pytest.raises(PlanError, match=r"exe.train_from_dataset.*SimpleNamespace"):
        executor.train_from_dataset(program, dataset)
    with pytest.raises(PlanError, match=r"exe.infer_from_dataset.*NoneType"):
        executor.infer_from_dataset()
    with pytest.raises(PlanError, match="fetch_info has 1"):
        executor.train_from_dataset(None, dataset, fetch_list=[*slots], fetch_info=["one"])
    with pytest.raises(PlanError, match="print_period is 0"):
        executor.train_from_dataset(None, dataset, fetch_list=[slots[0]], print_period=0)
    dataset.init(batch_size=4, use_var=slots)
    with pytest.raises(PlanError, match="'ids' twice"):
        executor.train_from_dataset(None, dataset)
    with pytest.raises(PlanError, match="slots_shuffle"):
        IN_MEMORY().slots_shuffle(["ids"])


def test_a_shape_with_two_unknown_dimensions_is_refused(plugin, tmp_path):
    slots = [paddle.static.data("tags", [-1, -1, -1], "int64")]
    with pytest.raises(PlanError, match="'tags'"):
        feeds_of(slots, ragged_file(tmp_path))


@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_ends_a_wait_for_data_and_the_command(slots, tmp_path):
    flag = tmp_path / "alive"
    dataset = dataset_of(QUEUE, numbered(tmp_path, [4]), slots, pipe_command=f"echo $$ > {flag}; exec sleep 100")

    def interrupt() -> None:
        while not flag.exists() or not flag.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        read(dataset)
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(flag.read_text()), 0)
