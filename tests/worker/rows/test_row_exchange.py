"""Answers to asks about copies are complete, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import Action, Block
from fleet_sparse.worker.rows.cache_step import Answer
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_exchange import RowAsk, answer_of

DIM = 2
ADAGRAD, SGD = (TableSpec(name=rule, dim=DIM, rule=rule, initializer=constant(0.0)) for rule in ("adagrad", "sgd"))


def block(spec: TableSpec, count: int, rows: np.ndarray | None, **copies: np.ndarray) -> Block:
    return Block(Action.ROWS, spec.table_id, 0, DIM, count, None, rows, copies=copies)


def answer(spec: TableSpec, slack: list[int], num_states: int = 1) -> Answer:
    """The answer to asks about a copy and about an id that enters, with what these numbers say."""
    unique, _ = Deduplicator(Placement.even(1)).unique([np.array([5, 6])], spec.salt)
    blocks = [block(spec, 2, None, slack=np.array(slack, np.uint8))]
    for code in (ROW_FOLLOWS, STATES_FOLLOW):
        count = slack.count(code)
        states = {"states": np.ones((count, num_states, DIM), np.float32)} if code == STATES_FOLLOW else {}
        if count:
            rows, versions = np.ones((count, DIM), np.float32), np.ones(count, np.uint32)
            blocks.append(block(spec, count, rows, versions=versions, **states))
    return answer_of(RowAsk(spec, unique, np.array([3, NO_VERSION], np.uint32)), blocks)


@pytest.mark.parametrize(("spec", "code"), [(ADAGRAD, STATES_FOLLOW), (SGD, ROW_FOLLOWS)], ids=["states", "no states"])
def test_an_id_that_enters_has_a_row(spec: TableSpec, code: int) -> None:
    assert answer(spec, [7, code]).rows.shape == (1, DIM)


@pytest.mark.parametrize("slack", [[7, 7], [7, ROW_FOLLOWS]], ids=["no row", "no states"])
def test_an_id_that_enters_without_its_states_is_refused(slack: list[int]) -> None:
    with pytest.raises(ValueError, match="adagrad"):
        answer(ADAGRAD, slack)


def test_states_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="adagrad"):
        answer(ADAGRAD, [7, STATES_FOLLOW], num_states=2)
