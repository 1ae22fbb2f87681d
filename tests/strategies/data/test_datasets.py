import os
import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.private import datasets as private_datasets
from tfdist.strategies.data import datasets
from tfdist.strategies.data.shares import as_share


@pytest.mark.parametrize("samples", [0, 1, 2, 5, 11, 33, 64])
@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_shares_are_contiguous_and_differ_by_one_at_most(samples, replicas):
    given = tf.constant(samples, tf.int64)
    ends = [int(end) for end in datasets._parts(given, 0, replicas, replicas)]
    for first in range(replicas):
        assert [int(end) for end in datasets._parts(given, first, 1, replicas)] == ends[first : first + 2]
    sizes = np.diff(ends)
    assert (ends[0], ends[-1]) == (0, samples)
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(sizes) <= 0).all(), "the first replicas have more, so that the chief is the last to have none"


def test_empty_batch_becomes_one_row_of_zeros():
    ragged = tf.RaggedTensor.from_row_lengths(tf.constant([], tf.float32), tf.constant([], tf.int64))
    sparse = tf.SparseTensor(tf.zeros([0, 2], tf.int64), tf.zeros([0]), [0, 4])
    batch = {"dense": tf.zeros([0, 3]), "ragged": ragged, "sparse": sparse, "text": tf.constant([], tf.string)}
    share = as_share(batch)
    assert int(share.rows) == 0
    assert share.data["dense"].shape == (1, 3)
    assert share.data["ragged"].nrows() == 1
    assert share.data["sparse"].dense_shape.numpy().tolist() == [1, 4]
    assert share.data["text"].numpy().tolist() == [b""]


def test_batch_with_rows_stays_unchanged():
    batch = (tf.ones([2, 3]), tf.constant(5.0))
    share = as_share(batch)
    assert int(share.rows) == 2
    assert share.data is batch


def test_files_that_are_read_inside_functions_are_found(tmp_path):
    (tmp_path / "a.txt").write_text("1\n2")
    name = str(tmp_path / "a.txt")
    assert private_datasets.can_be_sharded(tf.data.TextLineDataset([name]).batch(2).prefetch(1), 1)
    names = tf.data.Dataset.from_tensor_slices([name])
    assert private_datasets.can_be_sharded(names.interleave(tf.data.TextLineDataset).map(tf.strings.length).batch(2), 1)
    assert not private_datasets.can_be_sharded(names.map(tf.io.read_file).batch(1), 1)
    assert not private_datasets.can_be_sharded(tf.data.Dataset.range(4).batch(2), 1)


def test_shards_of_files_are_shards_of_what_is_read_from_each_record(tmp_path):
    (tmp_path / "a.txt").write_text("1\n2")
    names = tf.data.Dataset.from_tensor_slices([str(tmp_path / "a.txt")])
    lines, memory = tf.data.TextLineDataset(names.take(3).cache()), tf.data.Dataset.from_tensors("0")
    sharded = (
        lines.map(tf.strings.length).filter(lambda length: length > 0).shuffle(2).repeat().batch(2),
        names.interleave(lambda name: tf.data.TextLineDataset(name).skip(1)),
    )
    of_all = (
        lines.take(1),
        lines.skip(1).batch(2),
        lines.shard(10, 0).batch(2),
        lines.cache().batch(2),
        lines.enumerate(),
        lines.concatenate(memory),
        tf.data.Dataset.zip((lines, memory)).map(lambda line, _: line),
        lines.scan(0, lambda state, line: (state + 1, line)),
        tf.data.Dataset.sample_from_datasets([lines, lines], weights=[0.5, 0.5]).filter(lambda line: True),
    )
    for dataset in sharded:
        assert private_datasets.can_be_sharded(dataset, 1)
        assert not datasets.is_cut_by_samples(dataset, 1)
    for dataset in of_all:
        assert not private_datasets.can_be_sharded(dataset, 1)
        assert datasets.is_cut_by_samples(dataset, 1)


def test_fewer_files_than_processes_are_read_by_all(tmp_path):
    names = [str(tmp_path / name) for name in "ab"]
    for name in names:
        (tmp_path / name).write_text("1\n2")
    files = tf.data.Dataset.from_tensor_slices(names)
    for dataset in (
        tf.data.TextLineDataset(names),
        tf.data.TextLineDataset(files),
        tf.data.TFRecordDataset(names).batch(2),
        files.interleave(tf.data.TextLineDataset),
        tf.data.Dataset.list_files(names).flat_map(tf.data.TFRecordDataset),
    ):
        assert private_datasets.can_be_sharded(dataset, 2)
        assert not private_datasets.can_be_sharded(dataset, 3)
    for dataset in (
        files.repeat().interleave(tf.data.TextLineDataset),
        files.filter(lambda name: True).flat_map(tf.data.TextLineDataset),
    ):
        assert private_datasets.can_be_sharded(dataset, 3), "nobody knows the number of files"


def test_a_shard_of_a_shard_is_warned_of(caplog):
    """Not where the policy says that shards are each process's own, nor a division into other parts."""
    data = tf.data.Dataset.range(8)
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    sharded = data.shard(2, 1).batch(2)
    for given in (data.shard(4, 1).batch(2), data.shard(2, 0).batch(2), sharded.with_options(off), data.batch(2)):
        datasets.warn_of_own_shards(given, processes=2, rank=1)
    assert caplog.text == ""
    datasets.warn_of_own_shards(sharded.map(lambda x: x + 1), processes=2, rank=1)
    assert "this dataset has been sharded for 2 processes" in caplog.text


def test_own_samples_are_warned_of(caplog):
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    datasets.warn_of_own_samples(tf.data.Dataset.range(8).batch(2))
    assert caplog.text == ""
    datasets.warn_of_own_samples(tf.data.Dataset.range(8).batch(2).with_options(off))
    assert "Give all processes the same dataset" in caplog.text


@pytest.mark.parametrize("cores", [1, 2])
def test_only_processes_of_several_cores_read_ahead(monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    read = [threading.Event() for _ in range(3)]

    def batches():
        for number, event in enumerate(read):
            event.set()
            yield np.full(2, number)

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([2], tf.int64))
    iterator = iter(datasets._read_ahead(private_datasets.not_tuned(dataset)))
    for number in range(2):
        assert next(iterator).numpy()[0] == number
        if cores > 1:
            assert read[number + 1].wait(100)
        else:
            assert not read[number + 1].is_set()


def test_passes_in_new_orders_are_not_read_ahead(monkeypatch):
    """What else reads the dataset draws its order before the next pass, on all processes alike."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    dataset = tf.data.Dataset.range(4).shuffle(4, seed=1).repeat().batch(4)
    assert datasets._read_ahead(dataset) is dataset
