import numpy as np
import pytest

from tfdist.parameter_server.protocol.state import TrainingState

STATE = TrainingState(
    [np.ones(2), np.zeros(3)],
    [{"momentum": np.full(2, 3.0), "average": np.full(2, 4.0)}, {}],
    {"iteration": np.array(5)},
)


def test_state_survives_conversion_to_arrays():
    slots, scalars = STATE.names()
    assert (slots, scalars) == ((("momentum", "average"), ()), ("iteration",))
    again = TrainingState.of_arrays(STATE.arrays(), 2, slots, scalars)
    assert again.names() == STATE.names()
    for array, other in zip(again.arrays(), STATE.arrays(), strict=True):
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("arrays", [STATE.arrays()[:-1], [*STATE.arrays(), np.ones(1)]])
def test_wrong_number_of_arrays_raises(arrays):
    with pytest.raises(ValueError, match=rf"{len(arrays)} arrays for a state that has 5"):
        TrainingState.of_arrays(arrays, 2, *STATE.names())
