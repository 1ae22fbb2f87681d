import tensorflow as tf

from tfdist.engine.call_sites import call_site


def sites_of(function, *signature):
    """The names that are given while a function is traced."""
    names = []

    def traced(*args):
        function(names, *args)
        return tf.constant(0)

    traced.__name__ = "traced"
    tf.function(traced, autograph=False).get_concrete_function(*signature)
    return names


def body(names, *args):
    names.append(call_site("sum"))
    tf.cond(tf.constant(True), lambda: _note(names), lambda: _note(names))
    tf.cond(tf.constant(True), lambda: _note(names), lambda: _note(names))
    names.append(call_site("sum"))
    names.append(call_site("gather"))


def _note(names, members=()):
    names.append(call_site("sum", members))
    return tf.constant(1)


def test_each_call_site_has_a_unique_name():
    names = sites_of(body)
    assert len(names) == len(set(names)) == 7


def test_names_do_not_change_when_a_function_is_traced_again_with_other_shapes():
    first = sites_of(body, tf.TensorSpec([32, 4]))
    again = sites_of(body, tf.TensorSpec([7, 4]))
    assert first == again


def test_nested_functions_have_stable_distinct_names():
    def outer(names):
        inner = tf.function(lambda: _note(names), autograph=False)
        inner()
        names.append(call_site("sum"))

    assert len(set(sites_of(outer))) == 2
    assert sites_of(outer) == sites_of(outer)


def test_call_sites_are_numbered_per_group():
    """Rank 1 is in two groups, and another member in one of them only."""

    def function(*groups):
        def trace(names):
            for members in groups:
                names.append(call_site("sum", members))
                tf.function(lambda members=members: _note(names, members), autograph=False)()

        return trace

    both = sites_of(function((0, 1), (2, 1)))
    assert both[:2] == sites_of(function((0, 1)))
    assert both[2:] == sites_of(function((2, 1)))


def _made_first(names):
    """A function that makes a variable in its first trace, as Keras's optimizers and metrics do."""
    made = []

    def inner():
        made.append(tf.Variable(1.0)) if not made else None
        return _note(names)

    return tf.function(inner, autograph=False)


def test_a_trace_that_is_abandoned_does_not_count():
    def outer(names):
        _made_first(names)()

    first, again = sites_of(outer)
    assert first == again


def test_graphs_after_an_abandoned_trace_have_the_names_that_they_would_have_without():
    def outer(makes):
        def trace(names):
            for _ in range(2):
                (_made_first(names) if makes else tf.function(lambda: _note(names), autograph=False))()

        trace.__name__ = "inner"
        return trace

    def of(names):
        tf.function(lambda: _note(names), autograph=False)

    abandoned, first, _, second = sites_of(outer(True))
    assert abandoned == first != second
    assert [name.replace("<lambda>", "inner") for name in sites_of(outer(False))] == [first, second]


def test_functions_that_are_traced_before_either_is_called_have_names_of_their_own():
    def outer(names):
        inner = tf.function(lambda x: _note(names), autograph=False)
        prepared = [inner.get_concrete_function(tf.TensorSpec([rows])) for rows in (1, 2)]
        for rows, function in zip((1, 2), prepared, strict=True):
            function(tf.zeros([rows]))

    assert len(set(sites_of(outer))) == 2


def test_a_function_differentiated_before_its_namesake_is_traced_counts():
    def outer(names):
        x = tf.constant(1.0)
        for _ in range(2):
            inner = tf.function(lambda x: tf.cast(_note(names), tf.float32) * x, autograph=False)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = inner(x)
            tape.gradient(y, x)

    assert len(set(sites_of(outer))) == 2


def test_branches_and_loops_of_the_same_name_count():
    def outer(names):
        for _ in range(2):
            tf.while_loop(lambda turn: turn < 2, lambda turn: [turn + _note(names)], [tf.constant(0)])
            tf.switch_case(tf.constant(0), [lambda: _note(names), lambda: _note(names)])
            tf.map_fn(lambda turn: turn + _note(names), tf.range(2))

    names = sites_of(outer)
    assert len(names) == len(set(names)) == 8


def test_backward_passes_of_the_same_name_count():
    def outer(names):
        @tf.custom_gradient
        def with_a_site(x):
            return x, lambda gradient: gradient * tf.cast(_note(names), tf.float32)

        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(2):
                y = tf.function(lambda x: with_a_site(x), autograph=False)(y)
        tape.gradient(y, x)

    names = sites_of(outer)
    assert len(set(names)) == 2, names


def test_names_are_those_of_later_traces_where_a_first_call_makes_variables():
    """Whose initial values TensorFlow cannot compute before, as they are those of arguments."""
    made, names = [], []

    @tf.function(autograph=False)
    def step(x):
        if not made:
            made.append(tf.Variable(tf.reduce_sum(x)))
        body(names)
        return made[0] + x

    step(tf.ones(2))
    first = set(names)
    names.clear()
    step(tf.ones(3))
    assert set(names) == first
