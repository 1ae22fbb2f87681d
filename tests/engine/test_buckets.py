import numpy as np

from tfdist.engine import buckets

F32, F64 = np.dtype("float32"), np.dtype("float64")


def test_small_tensors_share_a_bucket():
    assert buckets.plan([10, 10, 10], [F32] * 3, limit=100) == [buckets.Bucket((0, 1, 2), F32)]


def test_bucket_is_closed_when_full():
    planned = buckets.plan([60, 60, 60, 200, 5], [F32] * 5, limit=100)
    assert [bucket.members for bucket in planned] == [(0, 1), (2, 3), (4,)]


def test_large_tensor_travels_alone():
    planned = buckets.plan([10, 500, 10], [F32] * 3, limit=1000, alone=500)
    assert [bucket.members for bucket in planned] == [(1,), (0, 2)]


def test_dtypes_do_not_mix():
    planned = buckets.plan([10, 10, 10, 10], [F32, F64, F32, F64], limit=100)
    assert planned == [buckets.Bucket((0, 2), F32), buckets.Bucket((1, 3), F64)]


def test_every_tensor_has_one_place():
    generator = np.random.default_rng(0)
    sizes = generator.integers(0, 300, 50).tolist()
    dtypes = [F32 if flip else F64 for flip in generator.integers(0, 2, 50)]
    planned = buckets.plan(sizes, dtypes, limit=256)
    assert sorted(member for bucket in planned for member in bucket.members) == list(range(50))
