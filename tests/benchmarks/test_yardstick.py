"""The work that tells how fast a machine is at the moment."""

from __future__ import annotations

import os
import time

from benchmarks.yardstick import Yardstick


def test_a_reading_is_a_part_of_the_cpu_that_it_took() -> None:
    yardstick = Yardstick()
    begun = time.process_time()
    assert 0 < yardstick.read() < time.process_time() - begun


def test_a_reading_leaves_the_process_all_of_its_cores() -> None:
    cores = os.sched_getaffinity(0)
    Yardstick().read()
    assert os.sched_getaffinity(0) == cores
