import gc

import numpy as np

from tfdist.comm.buffers import ALIGNMENT, BufferPool


def test_buffers_are_aligned_and_of_the_size_asked_for():
    pool = BufferPool()
    for nbytes in (0, 1, 100, 5000):
        buffer = pool.take(nbytes)
        assert buffer.nbytes == nbytes
        assert buffer.ctypes.data % ALIGNMENT == 0


def test_buffer_comes_back_when_the_last_view_is_gone():
    pool = BufferPool()
    buffer = pool.take(4096)
    address = buffer.ctypes.data
    view = buffer[64:128].view(np.float32).reshape(4, 4)
    del buffer
    gc.collect()
    assert pool.take(4096).ctypes.data != address, "still in use"
    del view
    gc.collect()
    assert address in (pool.take(4096).ctypes.data, pool.take(4096).ctypes.data)


def test_buffers_in_use_are_distinct():
    pool = BufferPool()
    held = [pool.take(1000) for _ in range(10)]
    assert len({buffer.ctypes.data for buffer in held}) == 10


def test_vectors_of_similar_sizes_share_memory():
    pool = BufferPool()
    addresses = set()
    for nbytes in range(1_000_000, 1_100_000, 10_000):
        buffer = pool.take(nbytes)
        assert buffer.nbytes == nbytes
        addresses.add(buffer.ctypes.data)
        del buffer
    assert len(addresses) <= 2
