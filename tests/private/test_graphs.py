import tensorflow as tf

from tfdist.private import graphs


def test_function_of_finds_functions_of_graph():
    inner = tf.function(lambda x: x + 1)
    graph = tf.function(lambda x: inner(x)).get_concrete_function(tf.constant(1.0)).graph
    (call,) = [operation for operation in graph.get_operations() if "PartitionedCall" in operation.type]
    assert graphs.function_of(graph, call.get_attr("f").name) is not None
    assert graphs.function_of(graph, "another") is None


def test_unordered_operations_wait_for_no_other_ones():
    def times():
        return tf.timestamp(), tf.timestamp(), graphs.unordered(tf.timestamp()), tf.timestamp()

    first, *others = tf.function(times, autograph=False).get_concrete_function().graph.get_operations()[:4]
    assert [operation.control_inputs for operation in others] == [[first], [], [others[0]]]
    assert float(graphs.unordered(tf.timestamp())) > 0, "eagerly, too"
