import keras

from tests.strategies.ranked import Ranked, in_step
from tfdist.strategies.keras.keras_assignments import Assigned


def test_assignments_are_noted_by_their_thread_inside_the_block(ranks):
    strategy = Ranked(ranks(1).groups[0])
    with strategy.scope():
        first, second, third = (keras.Variable(0.0) for _ in range(3))
    outer, inner = Assigned(), Assigned()

    def step():
        with outer.noted():
            second.assign(1.0)
            with inner.noted():
                third.assign(2.0)
            first.assign_add(3.0)
            second.assign(4.0)
        third.assign(5.0)

    in_step(strategy, 1, 1, step)
    assert outer.among([first, second, third]) == [second, first]
    assert outer.among([first]) == [first]
    assert len(outer.values[id(second)]) == 2
    assert inner.among([first, second, third]) == [third]
    assert [float(variable) for variable in (first, second, third)] == [3.0, 4.0, 5.0]
