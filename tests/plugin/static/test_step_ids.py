from __future__ import annotations

import threading

import numpy as np
import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.plugin.static.step_ids import NUM_KEPT, StepIds
from fleet_sparse.worker.rows.deduplicator import UniqueIds


def ids_of(*ids: int) -> dict[str, UniqueIds]:
    return {"t": UniqueIds(np.array(ids), np.array([len(ids)]))}


def test_a_ticket_stands_for_the_ids_of_its_step():
    step_ids, first, second = StepIds(), ids_of(1), ids_of(2)
    tickets = [step_ids.put(first), step_ids.put(second)]
    assert [step_ids.take(ticket) for ticket in reversed(tickets)] == [second, first]


def test_a_ticket_is_taken_once():
    step_ids = StepIds()
    ticket = step_ids.put(ids_of(1))
    step_ids.take(ticket)
    with pytest.raises(FleetSparseError, match=f"ticket {ticket}"):
        step_ids.take(ticket)


def test_steps_that_have_finished_drop_no_ids():
    step_ids = StepIds()
    slow = step_ids.put(ids_of(1))
    for number in range(10 * NUM_KEPT):
        step_ids.take(step_ids.put(ids_of(number)))
    assert step_ids.take(slow)["t"].ids[0] == 1


def test_of_too_many_steps_in_flight_the_oldest_is_dropped():
    step_ids = StepIds()
    tickets = [step_ids.put(ids_of(number)) for number in range(NUM_KEPT + 1)]
    with pytest.raises(FleetSparseError, match=str(NUM_KEPT)):
        step_ids.take(tickets[0])
    assert [step_ids.take(ticket)["t"].ids[0] for ticket in tickets[1:]] == list(range(1, NUM_KEPT + 1))


def test_the_last_run_to_end_drops_the_ids_of_all_that_failed():
    step_ids = StepIds()
    step_ids.begin_run()
    step_ids.begin_run()
    failed, slow = step_ids.put(ids_of(1)), step_ids.put(ids_of(2))
    step_ids.end_run()
    assert step_ids.take(slow)["t"].ids[0] == 2
    step_ids.end_run()
    with pytest.raises(FleetSparseError, match=f"ticket {failed}"):
        step_ids.take(failed)


def test_steps_of_several_threads_have_different_tickets():
    step_ids = StepIds()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            if step_ids.take(step_ids.put(ids_of(number)))["t"].ids[0] != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
