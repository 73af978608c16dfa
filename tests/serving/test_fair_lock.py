from __future__ import annotations

import threading

from fleet_sparse.serving.fair_lock import FairLock


def test_a_thread_that_asks_again_gets_the_lock_last() -> None:
    lock, order = FairLock(), list[int]()
    asked = threading.Event()

    def take() -> None:
        asked.set()
        with lock:
            order.append(1)

    other = threading.Thread(target=take)
    with lock:
        other.start()
        asked.wait()
        while not lock.num_waiting:
            pass
    with lock:
        order.append(0)
    other.join()
    assert order == [1, 0]


def test_only_one_thread_has_the_lock() -> None:
    lock, total = FairLock(), [0]

    def add() -> None:
        for _ in range(2000):
            with lock:
                before = total[0]
                total[0] = before + 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == [8000]
