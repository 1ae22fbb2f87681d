import ctypes

import numpy as np
import pytest

from tfdist.comm import page_locks
from tfdist.comm.buffers import BufferPool
from tfdist.comm.page_locks import PageLocks


class Driver:
    """A driver that there is not.

    Args:
        fails: the name of a function that fails.

    Attributes:
        locked: sizes by address.
        contexts: how many are current.
        devices: whose contexts were asked for.
    """

    def __init__(self, fails=None):
        self.fails = fails
        self.locked = {}
        self.contexts = 0
        self.devices = []

    def cuInit(self, flags):
        return 3 if self.fails == "cuInit" else 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.devices.append(device)
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.contexts += 1
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.contexts -= 1
        return 0

    def cuMemHostRegister_v2(self, address, size, flags):
        self.locked[address.value] = size.value
        assert flags == 1
        return 712 if self.fails == "cuMemHostRegister_v2" else 0


@pytest.fixture
def process_locks(monkeypatch):
    """This process's locks."""
    locks = PageLocks()
    monkeypatch.setattr("tfdist.comm.buffers.page_locks", locks)
    page_locks._say.cache_clear()
    yield locks
    page_locks._driver.cache_clear()


def beside(monkeypatch, driver):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    page_locks._driver.cache_clear()
    return driver


def test_memory_is_locked_once_for_the_device(monkeypatch, process_locks):
    driver = beside(monkeypatch, Driver())
    pool = BufferPool()
    pool.take(1 << 20)
    assert not driver.locked, "before a GPU is known"
    process_locks.device = 2
    buffer = pool.take(1 << 22)
    address = buffer.ctypes.data
    assert [size >= 1 << 22 for size in driver.locked.values()] == [True]
    assert next(iter(driver.locked)) <= address < next(iter(driver.locked)) + 64
    assert (driver.devices, driver.contexts) == ([2], 0)
    del buffer
    assert pool.take(1 << 22).ctypes.data == address
    pool.take(1 << 12)
    assert len(driver.locked) == 1, "what is taken again, or small, is not locked"
    (kept,) = process_locks._kept
    assert kept.ctypes.data == next(iter(driver.locked)), "also when its pool is gone"


@pytest.mark.parametrize("fails", ["cuInit", "cuMemHostRegister_v2"])
def test_memory_stays_usable_when_locking_fails(monkeypatch, process_locks, caplog, fails):
    driver = beside(monkeypatch, Driver(fails))
    process_locks.device = 0
    pool = BufferPool()
    assert len({pool.take(1 << 20).nbytes for _ in range(3)}) == 1
    assert [record.message for record in caplog.records if "does not lock host memory" in record.message] != []
    assert len(caplog.records) == 1, "said once"
    assert driver.contexts == 0


def test_missing_driver_locks_no_memory_and_logs_nothing(monkeypatch, process_locks, caplog):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    page_locks._driver.cache_clear()
    process_locks.device = 0
    assert not process_locks.lock(np.zeros(1 << 20, np.uint8))
    assert not caplog.records
