from __future__ import annotations

import gc
import mmap
import resource
import threading

import numpy as np
import pytest

from fleet_sparse.pserver.storage import virtual_memory
from fleet_sparse.pserver.storage.virtual_memory import (
    ADDRESS_SPACE_BYTES,
    HUGE_PAGE_BYTES,
    HUGE_PAGES_FROM,
    LEAST_BYTES,
    MAX_TABLES,
    MEMORIES_PER_TABLE,
    PAGE_BYTES,
    POPULATE_FROM,
    AddressSpace,
    Populator,
    ReservedMemory,
)

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


@pytest.fixture(params=[False, True], ids=["small_pages", "huge_pages"])
def memory(request):
    memory = ReservedMemory(huge_pages=request.param)
    yield memory
    memory.close()


def num_faults(act):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    act()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def populate(memory):
    while memory.populate_next():
        pass


def test_memory_is_as_large_as_the_machine_and_zero(memory):
    array = memory.array(np.int64)
    assert array.nbytes == memory.num_bytes > 64 * MIB
    assert array[0] == array[-1] == 0


def test_memory_begins_at_a_huge_page(memory):
    assert memory.array(np.uint8).ctypes.data % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("in_use", [POPULATE_FROM, HUGE_PAGES_FROM + 5 * PAGE_BYTES])
def test_populated_memory_is_written_without_a_fault(memory, in_use):
    memory.in_use = in_use
    populate(memory)
    begin = in_use // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    ahead = memory.array(np.uint8)[begin : begin + memory.num_resident - begin : PAGE_BYTES]
    assert len(ahead) >= in_use // virtual_memory.AHEAD_FRACTION // PAGE_BYTES
    assert num_faults(lambda: ahead.fill(1)) < 8


def test_populating_keeps_what_was_written(memory):
    memory.in_use = POPULATE_FROM
    numbers = memory.array(np.int64)[POPULATE_FROM // 8 :][: HUGE_PAGE_BYTES // 8]
    numbers[:] = np.arange(len(numbers))
    populate(memory)
    assert (numbers == np.arange(len(numbers))).all()


def test_populating_goes_a_bounded_amount_ahead(memory):
    memory.in_use = 64 * MIB
    populate(memory)
    assert 66 * MIB <= memory.num_resident <= 68 * MIB


def test_little_memory_in_use_is_not_populated_ahead(memory):
    memory.in_use = POPULATE_FROM - 1
    assert not memory.wants_more()
    assert not memory.populate_next()
    assert memory.num_resident == POPULATE_FROM - 1


def test_populating_is_wanted_again_when_half_of_the_way_is_used(memory):
    memory.in_use = 64 * MIB
    assert memory.wants_more()
    populate(memory)
    assert not memory.wants_more()
    memory.in_use = 66 * MIB
    assert memory.wants_more()


def test_released_pages_are_zero_and_no_longer_counted(memory):
    array = memory.array(np.uint8)
    array[: 48 * MIB] = 7
    memory.in_use = 48 * MIB
    end = 40 * MIB + 100
    memory.release_before(end)
    assert not array[: 40 * MIB].any()
    assert (array[end : 48 * MIB] == 7).all()
    assert memory.num_resident == 8 * MIB


def test_page_that_is_partly_in_use_is_not_released(memory):
    array = memory.array(np.uint8)
    array[: 3 * PAGE_BYTES] = 7
    memory.release_before(2 * PAGE_BYTES - 1)
    assert not array[:PAGE_BYTES].any()
    assert (array[PAGE_BYTES : 3 * PAGE_BYTES] == 7).all()


def test_memory_from_somewhere_on_is_given_back(memory):
    array = memory.array(np.uint8)
    array[: 48 * MIB] = 7
    memory.in_use = 48 * MIB
    populate(memory)
    memory.in_use = 40 * MIB + 100
    memory.release_from(memory.in_use, 48 * MIB)
    assert (array[: 40 * MIB + 100] == 7).all()
    assert not array[42 * MIB : 48 * MIB].any()
    assert memory.num_resident <= 42 * MIB


def test_page_that_is_partly_in_use_is_not_given_back(memory):
    array = memory.array(np.uint8)
    array[: 3 * PAGE_BYTES] = 7
    memory.release_from(PAGE_BYTES + 1, 3 * PAGE_BYTES)
    assert (array[: 2 * PAGE_BYTES] == 7).all()
    assert not array[2 * PAGE_BYTES : 3 * PAGE_BYTES].any()


@pytest.mark.parametrize("release", [lambda m: m.release_from(2 * MIB, 4 * MIB), lambda m: m.release_before(2 * MIB)])
def test_memory_that_the_system_keeps_is_overwritten(memory, monkeypatch, caplog, release):
    array = memory.array(np.uint8)
    array[: 4 * MIB] = 7
    monkeypatch.setattr(memory, "_advise", lambda begin, end, advice: advice != mmap.MADV_DONTNEED)
    release(memory)
    halves = array[: 2 * MIB].any(), array[2 * MIB : 4 * MIB].any()
    assert sorted(halves) == [False, True]
    assert "MADV_DONTNEED" in caplog.text


def test_memory_that_was_given_back_is_populated_again(memory):
    memory.in_use = 64 * MIB
    populate(memory)
    memory.in_use = POPULATE_FROM
    memory.release_from(POPULATE_FROM, 64 * MIB)
    memory.in_use = 62 * MIB
    assert memory.wants_more()
    populate(memory)
    assert memory.num_resident >= 63 * MIB


def test_released_memory_that_is_used_again_counts(memory):
    memory.in_use = 48 * MIB
    memory.release_before(40 * MIB)
    memory.use_again_from(36 * MIB)
    assert memory.num_resident == 12 * MIB
    memory.use_again_from(44 * MIB)
    assert memory.num_resident == 12 * MIB


def test_populator_backs_memory_ahead_on_its_own_thread(memory):
    done = threading.Event()
    populate_next = memory.populate_next
    memory.populate_next = lambda: populate_next() or bool(done.set())
    memory.in_use = 64 * MIB
    populator = Populator([memory])
    populator.wake_if_needed()
    assert done.wait(timeout=30)
    populator.stop()
    assert not memory.wants_more()
    assert "fleet_sparse-populate" not in {thread.name for thread in threading.enumerate()}


def test_populator_serves_its_memories_in_turn(monkeypatch):
    monkeypatch.setattr(ReservedMemory, "wants_more", lambda self: True)
    served, done = [], threading.Event()
    memories = [ReservedMemory(huge_pages=True) for _ in range(2)]
    for number, memory in enumerate(memories):

        def serve(number=number):
            served.append(number)
            if len(served) == 6:
                done.set()
            return len(served) < 6

        memory.populate_next = serve
    populator = Populator(memories)
    populator.wake_if_needed()
    assert done.wait(timeout=30)
    populator.stop()
    assert served[:6] == [0, 1] * 3
    for memory in memories:
        memory.close()


def test_second_populator_thread_starts_if_the_first_is_late(memory):
    begun, may_end = threading.Semaphore(0), threading.Event()

    def step():
        begun.release()
        assert may_end.wait(timeout=30)
        return False

    memory.populate_next, memory.wants_more = step, lambda: True
    populator = Populator([memory])
    populator.wake_if_needed()
    assert begun.acquire(timeout=30)
    populator.wake_if_needed()  # the first thread is busy
    assert not begun.acquire(blocking=False)
    populator.wake_if_needed()
    assert begun.acquire(timeout=30)
    may_end.set()
    populator.stop()


def test_threads_that_populate_at_once_share_the_work(memory):
    memory.in_use = 256 * MIB
    steps = []
    threads = [threading.Thread(target=lambda: steps.extend(iter(memory.populate_next, False))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(steps) == 256 // virtual_memory.AHEAD_FRACTION // 2
    ahead = memory.array(np.uint8)[256 * MIB : memory.num_resident : PAGE_BYTES]
    assert num_faults(lambda: ahead.fill(1)) < 8


def test_populator_that_was_never_woken_stops():
    Populator([]).stop()


def test_refused_address_space_says_what_to_do(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"address space \(not of memory\).*overcommit_memory"):
        ReservedMemory(huge_pages=True)


def test_a_thousand_tables_start_on_a_machine_of_a_terabyte(monkeypatch):
    monkeypatch.setattr(virtual_memory, "_machine_bytes", lambda: TIB)
    memories = []
    try:
        for _ in range(1000 * MEMORIES_PER_TABLE):
            memories.append(ReservedMemory(huge_pages=True))
    finally:
        sizes = [memory.num_bytes for memory in memories]
        for memory in memories:
            memory.close()
    assert len(sizes) == 1000 * MEMORIES_PER_TABLE
    assert min(sizes) >= LEAST_BYTES


@pytest.mark.parametrize("machine_bytes", [24 * GIB, TIB])
def test_first_tables_may_use_all_memory(machine_bytes):
    space = AddressSpace()
    assert [space.take(machine_bytes) for _ in range(30)] == [machine_bytes] * 30


@pytest.mark.parametrize("machine_bytes", [MIB * 512, 24 * GIB, TIB, 64 * TIB])
def test_all_tables_fit_into_the_address_space(machine_bytes):
    space = AddressSpace()
    sizes = [space.take(machine_bytes) for _ in range(MAX_TABLES * MEMORIES_PER_TABLE)]
    assert sum(sizes) <= ADDRESS_SPACE_BYTES
    assert min(sizes) == min(machine_bytes, LEAST_BYTES)
    assert all(size % HUGE_PAGE_BYTES == 0 for size in sizes)


def test_closed_memory_gives_its_addresses_back(monkeypatch):
    monkeypatch.setattr(virtual_memory, "_machine_bytes", lambda: 64 * TIB)
    monkeypatch.setattr(virtual_memory, "_address_space", AddressSpace())
    sizes = []
    for _ in range(3):
        memory = ReservedMemory(huge_pages=False)
        sizes.append(memory.num_bytes)
        memory.close()
    assert sizes == sizes[:1] * 3


def test_forgotten_memory_gives_its_addresses_back(monkeypatch):
    monkeypatch.setattr(virtual_memory, "_machine_bytes", lambda: 64 * TIB)
    monkeypatch.setattr(virtual_memory, "_address_space", AddressSpace())
    size = ReservedMemory(huge_pages=False).num_bytes
    gc.collect()
    assert ReservedMemory(huge_pages=False).num_bytes == size
