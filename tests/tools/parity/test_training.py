"""Training in plain Paddle in place of several workers; tests/e2e/test_parity.py compares pservers with it."""

from __future__ import annotations

from functools import cache

import numpy as np
import paddle
import pytest

from fleet_sparse.cli.parity import ClipChoice, OptimizerChoice
from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.initializer import initial_rows, uniform
from fleet_sparse.core.mode import AVG, SUM, Mode
from fleet_sparse.tools.parity.model import CLICKS, DYADIC
from fleet_sparse.tools.parity.training import CLIPS, OPTIMIZERS, ParityJob, merge_gradients, train_plain

STEPS = 50


MODELS = {"clicks": CLICKS, "dyadic": DYADIC}


@cache
def trained(model, num_workers, scale, optimizer, clip):
    job = ParityJob(MODELS[model], [optimizer], STEPS, Mode(scale=scale), clip)
    return train_plain(job, num_workers)[optimizer]


@pytest.fixture
def plain(plugin):
    """`plain(model, num_workers)`: what plain Paddle trains in place of `num_workers` workers; each is trained once."""
    return lambda model, num_workers, scale=AVG, optimizer="sgd", clip=None: trained(
        model, num_workers, scale, optimizer, clip
    )


def float32(*values):
    return np.array(values, np.float32)


def minimized_losses(name):
    """Losses of CLICKS as a user of Paddle trains it: one program, and `minimize`."""
    tables = {}

    def parameter(part, values):
        attr = paddle.ParamAttr(name=part, initializer=paddle.nn.initializer.Assign(values))
        return paddle.create_parameter(list(values.shape), "float32", attr=attr)

    def lookup(ids, table):
        if table not in tables:
            dim, salt = CLICKS.tables[table].dim, table_salt(f"parity.{name}.{table}")
            rows = initial_rows(uniform(-0.1, 0.1), np.arange(CLICKS.num_ids), dim=dim, seed=0, salt=salt)
            tables[table] = parameter(table, rows)
        return paddle.nn.functional.embedding(ids, tables[table])

    inputs = {
        "items": paddle.static.data("items", [-1, 2], "int64"),
        "users": paddle.static.data("users", [-1], "int64"),
        "label": paddle.static.data("label", [-1, 1], "float32"),
    }
    loss = paddle.mean(CLICKS.losses(inputs, lookup, parameter))
    optimizer, executor = OPTIMIZERS[name](), paddle.static.Executor(paddle.CPUPlace())
    optimizer.minimize(loss)
    executor.run(paddle.static.default_startup_program())
    losses = []
    for (batch,) in CLICKS.steps(STEPS, 1):
        losses.append(float(executor.run(feed=batch, fetch_list=[loss])[0]))
        if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
            optimizer._learning_rate.step()
    return losses


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_plain_paddle_for_one_worker_is_minimize(plain, optimizer):
    assert plain("clicks", 1, optimizer=optimizer).losses[:, 0].tolist() == minimized_losses(optimizer)


@pytest.mark.parametrize("scale", [AVG, SUM])
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_several_workers_train_as_one_with_all_examples(plain, optimizer, num_workers, scale):
    one, several = (plain("clicks", n, scale, optimizer) for n in (1, num_workers))
    for table, rows in one.rows.items():
        np.testing.assert_allclose(several.rows[table], rows, rtol=0, atol=1e-6)


@pytest.mark.parametrize("clip", CLIPS)
def test_several_clipped_workers_train_as_one_with_all_examples(plain, clip):
    one, several = (plain("clicks", n, clip=clip) for n in (1, 2))
    unclipped = plain("clicks", 1)
    for table, rows in one.rows.items():
        np.testing.assert_allclose(several.rows[table], rows, rtol=0, atol=1e-6)
        assert np.abs(unclipped.rows[table] - rows).max() > 1e-3


@pytest.mark.parametrize("scale", [AVG, SUM])
@pytest.mark.parametrize("num_workers", [2, 3, 4, 6])
def test_dyadic_model_has_equal_bits_for_any_number_of_workers(plain, num_workers, scale):
    one, several = plain("dyadic", 1), plain("dyadic", num_workers, scale)
    assert {name: rows.tolist() for name, rows in several.rows.items()} == {
        name: rows.tolist() for name, rows in one.rows.items()
    }


@pytest.mark.parametrize("num_workers", [2, 3, 4, 6])
def test_dyadic_losses_of_shares_add_up_to_the_same_bits(plain, num_workers):
    assert plain("dyadic", num_workers, SUM).losses.sum(axis=1).tolist() == plain("dyadic", 1).losses[:, 0].tolist()


def test_gradients_are_averaged_by_the_number_of_examples():
    merged = merge_gradients([float32(1, 0), float32(4, 8)], [1, 2], AVG)
    assert merged.tolist() == [3.0, np.float32(8) / np.float32(1.5)]


def test_gradients_are_summed_whatever_the_number_of_examples():
    assert merge_gradients([float32(1, 0), float32(4, 8)], [1, 2], SUM).tolist() == [5.0, 8.0]


@pytest.mark.parametrize(("order", "total"), [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)])
def test_gradients_are_added_in_float32_in_worker_order(order, total):
    merged = merge_gradients([float32(value) for value in order], [1, 1, 1], SUM)
    assert (merged.dtype, merged.tolist()) == (np.float32, [total])


def test_command_knows_every_optimizer_that_is_compared():
    assert [optimizer.value for optimizer in OptimizerChoice] == list(OPTIMIZERS)


def test_command_knows_every_clip_that_is_compared():
    assert [clip.value for clip in ClipChoice] == list(CLIPS)
