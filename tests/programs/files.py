"""Data in several files, read by tf.data, sharded by file; what `predict` returns is in the order of one process."""

import keras
import numpy as np
import tensorflow as tf
from common import PLAIN, folder, strategy, weights
from keras import layers

scope = strategy()
rng = np.random.default_rng(6)
place = folder("files")
for index in range(6):
    path, rows = place / f"part-{index}.tfrecord", rng.normal(size=(6, 3))
    if PLAIN or scope.rank == 0:
        with tf.io.TFRecordWriter(str(path) + ".new") as writer:
            for row in rows:
                feature = tf.train.Feature(float_list=tf.train.FloatList(value=row))
                writer.write(tf.train.Example(features=tf.train.Features(feature={"row": feature})).SerializeToString())
        path.with_suffix(".tfrecord.new").rename(path)
if not PLAIN:
    scope.reduce("SUM", tf.constant(1.0), axis=None)  # the files are there


def parse(record):
    row = tf.io.parse_single_example(record, {"row": tf.io.FixedLenFeature([3], tf.float32)})["row"]
    row = tf.cast(row, tf.float64)
    return row, tf.reduce_sum(row, keepdims=True)


def dataset(policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    names = sorted(str(path) for path in place.glob("*.tfrecord"))
    return tf.data.TFRecordDataset(names).map(parse).batch(6).with_options(options)


with scope.scope():
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")

policies = tf.data.experimental.AutoShardPolicy
results = {
    name: {
        "outputs": model.predict(dataset(policy), verbose=0),
        "evaluated": model.evaluate(dataset(policy), verbose=0),
    }
    for name, policy in {"auto": policies.AUTO, "file": policies.FILE, "data": policies.DATA}.items()
}
model.fit(dataset(policies.DATA), epochs=1, verbose=0)
results["weights"] = weights(model)
