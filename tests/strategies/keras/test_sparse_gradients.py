import pytest
import tensorflow as tf

from tfdist.strategies.keras.sparse_gradients import are_of_samples

LOOKUPS = {
    "words": (lambda words: words, True),
    "words that were shifted": (lambda words: tf.maximum(words - 1, 0), True),
    "positions": (lambda words: tf.range(3), False),
    "positions of a shape that is known": (lambda words: tf.range(words.shape[1]), False),
    "positions of a shape that is not": (lambda words: tf.range(tf.shape(words)[1]), False),
    "one for each sample": (lambda words: tf.range(tf.shape(words)[0]), True),
    "zeros like words": (tf.zeros_like, True),
    "in a condition": (lambda words: tf.cond(tf.size(words) > 0, lambda: tf.range(3), lambda: tf.range(2)), True),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_are_of_samples(name):
    lookup, expected = LOOKUPS[name]
    table = tf.Variable(tf.ones([10, 4]))
    offset = tf.constant(0)  # made outside: a constant that the graph captures
    answers = []

    @tf.function(input_signature=[tf.TensorSpec([None, None if "is not" in name else 3], tf.int32)], autograph=False)
    def gradient(words):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(table, lookup(words) + offset))
        slices = tape.gradient(total, table)
        answers.append(are_of_samples(slices))
        return slices.values

    gradient(tf.ones([2, 3], tf.int32))
    assert set(answers) == {expected}


def test_without_a_graph_rows_are_taken_for_those_of_samples():
    assert are_of_samples(tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1])))
