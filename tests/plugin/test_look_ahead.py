"""`fleet_sparse.look_ahead` around the loops of user programs, with the pserver inside this process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.errors import FleetSparseError, PlanError
from fleet_sparse.plugin.static.prefetch_queue import ExpectedBatch, PrefetchQueue
from fleet_sparse.worker.rows.early_rows import EarlyRows
from support.programs import DIM, flagged, ids_input, linear

Feed = dict[str, np.ndarray]
NUM_STEPS = 12


def item_ids():
    return ids_input((-1, 3), "item")


def loss_of(logit):
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, paddle.static.data("label", [-1, 1], "float32"))


def small_model():
    """One table."""
    return loss_of(paddle.sum(flagged(item_ids(), "items", None), axis=[1, 2]).unsqueeze(1))


def sparse_model():
    """Several tables: with padding, fed in another shape and type, shared by two inputs, with ids that are computed."""
    user = paddle.static.data("user", [-1, 1], "int64")
    friend = paddle.static.data("friend", [-1, 1], "int32")
    rows = [
        paddle.sum(flagged(item_ids(), "items", None, padding_idx=3), axis=1),
        flagged(paddle.reshape(user, [-1]), "users", None),
        flagged(paddle.squeeze(paddle.cast(friend, "int64"), 1), "users", None),
        flagged(paddle.reshape(user * 7 % 11, [-1]), "groups", None),
    ]
    return loss_of(paddle.sum(paddle.concat(rows, axis=1), axis=1, keepdim=True))


def model():
    """One table and a dense layer."""
    features = paddle.sum(flagged(item_ids(), "items", None), axis=1)
    return loss_of(linear(features))


def pooled_model():
    """One lookup of the ids of two inputs, which are pooled."""
    fields = [item_ids(), paddle.static.data("friend", [-1, 1], "int32")]
    attr = paddle.ParamAttr(name="items", initializer=paddle.nn.initializer.Uniform(-0.5, 0.5))
    pooled = fleet_sparse.pooled_embedding(
        fields, [10**11, DIM], "mean", padding_idx=3, param_attr=attr, is_sparse=True, is_distributed=True
    )
    return loss_of(paddle.sum(paddle.concat(pooled, axis=1), axis=1, keepdim=True))


def batches(num_steps: int = NUM_STEPS, seed: int = 0, names: Sequence[str] = ("item", "label")) -> Iterator[Feed]:
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        feed = {
            "item": rng.integers(0, 30, (6, 3)),
            "user": rng.integers(-8, 8, (6, 1)),
            "friend": rng.integers(-8, 8, (6, 1)).astype(np.int32),
            "label": rng.integers(0, 2, (6, 1)).astype(np.float32),
        }
        yield {name: feed[name] for name in names}


class Trained(NamedTuple):
    """A program that trains."""

    inputs: dict[str, Any]
    loss: Any
    test: Any  # its test clone
    executor: Any

    def step(self, feed: Any) -> bytes:
        """The loss of a step, bit by bit."""
        return self.executor.run(feed=feed, fetch_list=[self.loss])[0].tobytes()

    def evaluate(self, feed: Feed) -> bytes:
        return self.executor.run(self.test, feed=feed, fetch_list=[self.loss])[0].tobytes()


def strategy(kind: str = "async") -> Any:
    made = fleet_sparse.PserverStrategy(max_step_lag=1 if kind == "lag" else None)
    made.a_sync = kind != "sync"
    if kind == "geo":
        made.a_sync_configs = {"k_steps": 3}
    return made


@contextmanager
def training(network: Callable[[], Any], kind: str = "async") -> Iterator[Trained]:
    """A program in a job of its own."""
    paddle.enable_static()
    fleet_sparse.install()
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    try:
        with (
            paddle.static.program_guard(main, startup),
            paddle.static.scope_guard(scope),
            paddle.utils.unique_name.guard(),
        ):
            fleet.init()
            loss = network()
            data = [op for op in main.global_block().ops if op.name() == "pd_op.data"]
            inputs = {op.str_attr("name"): op.result(0) for op in data}
            fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.1), strategy(kind)).minimize(loss)
            executor = paddle.static.Executor(paddle.CPUPlace())
            executor.run(startup)
            fleet.init_worker()
            yield Trained(inputs, loss, main.clone(for_test=True), executor)
    finally:
        fleet_sparse.uninstall()


Look = Callable[[Iterable[Any]], Iterable[Any]]
Loop = Callable[[Trained, Look], list[bytes]]


def plainly(loader: Iterable[Any]) -> Iterable[Any]:
    return loader


def of_both(network: Callable[[], Any], loop: Loop, kind: str = "async") -> tuple[list[bytes], ...]:
    """Results of a loop without and with `look_ahead`."""
    results = []
    for look in (plainly, fleet_sparse.look_ahead):
        with training(network, kind) as trained:
            results.append(loop(trained, look))
    return tuple(results)


@pytest.fixture
def num_used(monkeypatch) -> Callable[[], int]:
    """How many steps used rows that were pulled ahead."""
    used = []
    pull = EarlyRows.pull
    monkeypatch.setattr(EarlyRows, "pull", lambda self, *args, **step: used.append(self) or pull(self, *args, **step))
    return lambda: len(used)


def whole(trained: Trained, look: Look) -> list[bytes]:
    return [trained.step(feed) for feed in look(batches(names=list(trained.inputs)))]


@pytest.mark.parametrize("kind", ["async", "sync", "lag", "geo"])
@pytest.mark.parametrize("network", [small_model, sparse_model, model, pooled_model])
def test_losses_are_those_of_the_plain_loop_bit_by_bit(network, kind, num_used):
    plain, ahead = of_both(network, whole, kind)
    assert ahead == plain
    assert len(set(plain)) == NUM_STEPS
    assert num_used() == (0 if kind == "geo" else NUM_STEPS - 1)


def counted_model():
    """One table whose ids get a row after they were named four times."""
    entry = paddle.distributed.CountFilterEntry(4)
    return loss_of(paddle.sum(flagged(item_ids(), "items", None, entry=entry), axis=[1, 2]).unsqueeze(1))


@pytest.mark.parametrize("kind", ["async", "sync", "lag"])
def test_rows_that_get_admitted_are_those_of_the_plain_loop(kind, num_used):
    plain, ahead = of_both(counted_model, whole, kind)
    assert ahead == plain
    assert len(set(plain)) > NUM_STEPS / 2
    assert num_used() == NUM_STEPS - 1


# Loops


def evaluated(trained: Trained, look: Look) -> list[bytes]:
    """Before each step the batch that is to come, after it another one."""
    other, losses = next(batches(seed=9)), []
    for feed in look(batches()):
        losses += [trained.evaluate(feed), trained.step(feed), trained.evaluate(other)]
    return losses


def saved(trained: Trained, look: Look) -> list[bytes]:
    losses = []
    for number, feed in enumerate(look(batches())):
        losses.append(trained.step(feed))
        if number % 4 == 1:
            fleet.barrier_worker()
        if number % 4 == 3:
            fleet.save_persistables(trained.executor, "model")
    return losses


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_barrier_and_a_save_between_steps_change_no_loss(kind, num_used, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    plain, ahead = of_both(small_model, saved, kind)
    assert ahead == plain
    assert num_used() == NUM_STEPS - 1 - 5


def changed(trained: Trained, look: Look) -> list[bytes]:
    losses = []
    for feed in look(batches()):
        feed["item"] %= 7
        losses.append(trained.step(feed))
    return losses


def failed(trained: Trained, look: Look) -> list[bytes]:
    losses = []
    for number, feed in enumerate(look(batches())):
        if number in (3, 7):
            with pytest.raises(ValueError, match="label"):
                trained.step({**feed, "label": np.zeros((5, 1), np.float32)})
        if number != 7:
            losses.append(trained.step(feed))
    return losses


def broken_off(trained: Trained, look: Look) -> list[bytes]:
    losses = [trained.step(feed) for feed in islice(look(batches()), 5)]
    losses += [trained.step(feed) for feed in batches()]
    return losses + [trained.step(feed) for feed in look(batches(seed=1))]


@pytest.mark.parametrize(
    ("loop", "kind", "num_used_then"),
    [
        (evaluated, "sync", NUM_STEPS - 1),
        (changed, "async", 0),
        (failed, "async", None),
        (failed, "sync", None),
        (broken_off, "async", 4 + NUM_STEPS - 1),
    ],
)
def test_a_loop_that_is_not_plain_changes_no_loss(loop, kind, num_used_then, num_used):
    """After a batch that was not the announced one, rows are pulled early again."""
    plain, ahead = of_both(model if loop in (evaluated, failed) else small_model, loop, kind)
    assert ahead == plain
    assert num_used_then in (None, num_used())


def test_a_loop_that_breaks_keeps_no_batch(monkeypatch):
    announced: list[weakref.ref[Any]] = []
    expect = PrefetchQueue.expect

    def noted(queue: PrefetchQueue, plan: Any, batch: ExpectedBatch) -> None:
        announced.append(weakref.ref(batch.ids[0]))
        expect(queue, plan, batch)

    monkeypatch.setattr(PrefetchQueue, "expect", noted)
    with training(small_model) as trained:
        for number, feed in enumerate(fleet_sparse.look_ahead(batches())):
            trained.step(feed)
            if number == 3:
                break
        gc.collect()
        assert [ids() is None for ids in announced] == [True] * 5


def test_a_loop_that_breaks_keeps_no_early_rows(monkeypatch):
    reserved: list[weakref.ref[Any]] = []
    begin = EarlyRows.begin

    def noted(early: EarlyRows, *arguments: Any, **options: Any) -> None:
        reserved.extend(weakref.ref(batch.values) for batch in early.batches.values())
        begin(early, *arguments, **options)

    monkeypatch.setattr(EarlyRows, "begin", noted)
    with training(small_model) as trained:
        for number, feed in enumerate(fleet_sparse.look_ahead(batches())):
            trained.step(feed)
            if number == 3:
                break
        gc.collect()
        assert [values() is None for values in reserved] == [True] * 4


def test_two_programs_may_take_turns():
    """Each has its loader; what the one had begun is stale when it is its turn again."""

    def loop(look: Callable[..., Iterable[Feed]]) -> list[bytes]:
        with training(small_model) as first:
            second, startup = paddle.static.Program(), paddle.static.Program()
            with paddle.static.program_guard(second, startup):
                loss = small_model()
                fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.1), strategy()).minimize(loss)
            first.executor.run(startup)
            losses = []
            loaders = look(batches()), look(batches(seed=1), second)
            for one, two in zip(*loaders, strict=True):
                losses.append(first.step(one))
                losses.append(first.executor.run(second, feed=two, fetch_list=[loss])[0].tobytes())
            return losses

    assert loop(lambda loader, program=None: loader) == loop(fleet_sparse.look_ahead)


# Loaders


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_every_batch_is_yielded_once_and_read_one_ahead(num_steps):
    feeds, read = list(batches(num_steps)), []
    with training(small_model):
        ahead = iter(fleet_sparse.look_ahead(feed for feed in feeds if read.append(0) is None))
        assert read == []
        for number, feed in enumerate(feeds, 1):
            assert next(ahead) is feed
            assert len(read) == min(number + 1, num_steps)
        assert list(ahead) == []


def test_a_loader_is_read_again_in_the_next_epoch():
    feeds = list(batches(3))
    with training(small_model):
        ahead = fleet_sparse.look_ahead(feeds)
        assert len(ahead) == 3
        assert [len(list(ahead)) for _ in range(2)] == [3, 3]
        with pytest.raises(TypeError):
            len(fleet_sparse.look_ahead(batches()))


class Rows(paddle.io.Dataset):
    """Examples of `batches`, joined."""

    def __init__(self) -> None:
        self.feeds = list(batches())

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        feed = self.feeds[index // 6]
        return feed["item"][index % 6], feed["label"][index % 6]

    def __len__(self) -> int:
        return 6 * len(self.feeds)


def paddles_loader(trained: Trained, num_workers: int, *, return_list: bool) -> Iterable[Any]:
    return paddle.io.DataLoader(
        Rows(),
        feed_list=[trained.inputs["item"], trained.inputs["label"]],
        places=paddle.CPUPlace(),
        return_list=return_list,
        batch_size=6,
        num_workers=num_workers,
    )


def feed_of(batch: Any) -> Feed:
    return dict(zip(("item", "label"), batch, strict=True))


@pytest.mark.parametrize("return_list", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_paddles_loader_yields_feeds(num_workers, return_list, num_used):
    def loop(trained: Trained, look: Look) -> list[bytes]:
        loader = paddles_loader(trained, num_workers, return_list=return_list)
        if not return_list:
            feeds = look(loader)
        else:
            feeds = map(feed_of, loader) if look is plainly else fleet_sparse.look_ahead(loader, feed=feed_of)
        return [trained.step(feed) for feed in feeds]

    plain, ahead = of_both(model, loop)
    assert ahead == plain
    assert num_used() == NUM_STEPS - 1


# Ids


def bounded():
    return loss_of(
        paddle.sum(flagged(item_ids(), "items", None, size=[30, DIM], is_distributed=False), axis=[1, 2]).unsqueeze(1)
    )


def past_the_bounds(trained: Trained, look: Look) -> list[bytes]:
    losses = []
    feeds = list(batches())
    feeds[4]["item"][0, 0] = 30
    for feed in look(feeds):
        try:
            losses.append(trained.step(feed))
        except ValueError as error:
            losses.append(str(error).encode())
    return losses


def test_invalid_ids_are_refused_by_their_own_run(num_used):
    plain, ahead = of_both(bounded, past_the_bounds)
    assert ahead == plain
    assert b"table 'items': id 30 is outside [0, 30)" in ahead[4]
    assert num_used() == NUM_STEPS - 3


# Errors


def test_a_program_that_was_not_minimized_is_refused():
    with training(small_model), paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        small_model()
        with pytest.raises(PlanError, match="minimize"):
            fleet_sparse.look_ahead(batches())


def computed():
    return paddle.mean(flagged(item_ids() * 2, "items", None) ** 2)


def computed_in_part():
    return paddle.mean(flagged(item_ids(), "items", None) * flagged(item_ids() * 2, "items", None))


def from_floats():
    ids = paddle.cast(paddle.static.data("item", [-1, 3], "float32"), "int64")
    return paddle.mean(flagged(ids, "items", None) ** 2)


@pytest.mark.parametrize("network", [computed, computed_in_part, from_floats])
def test_a_program_without_a_table_of_fed_ids_is_refused(network):
    with training(network):
        for program in (None, paddle.static.Program()):  # its own, and one without lookups
            with pytest.raises(PlanError, match="look_ahead"):
                fleet_sparse.look_ahead(batches(), program)


@pytest.mark.usefixtures("plugin")
def test_batches_before_init_worker_say_what_to_do():
    fleet.init()
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy()).minimize(small_model())
    ahead = fleet_sparse.look_ahead(batches())
    with pytest.raises(FleetSparseError, match=r"fleet\.init_worker\(\)"):
        next(iter(ahead))


def test_a_batch_that_is_no_feed_is_refused_in_its_turn():
    with training(small_model):
        feeds = iter(fleet_sparse.look_ahead([*batches(2), np.zeros((6, 3), np.int64)]))
        assert len(list(islice(feeds, 2))) == 2
        with pytest.raises(PlanError, match="ndarray"):
            next(feeds)


def same_dict() -> Iterator[Feed]:
    feed: Feed = {}
    for batch in batches():
        feed.update(batch)
        yield feed


def same_array() -> Iterator[Feed]:
    item = np.empty((6, 3), np.int64)
    for batch in batches():
        item[:] = batch["item"]
        yield {"item": item}


def same_array_in_other_feeds() -> Iterator[Any]:
    return (feed["item"] for feed in same_array())


@pytest.mark.parametrize(
    ("loader", "feed"),
    [(same_dict, None), (same_array, None), (same_array_in_other_feeds, lambda array: {"item": array})],
)
def test_a_loader_that_overwrites_a_waiting_batch_is_refused(loader, feed):
    with training(small_model), pytest.raises(PlanError, match="look_ahead"):
        next(iter(fleet_sparse.look_ahead(loader(), feed=feed)))
