import numpy as np

from tfdist.parameter_server.hierarchy.mirror import Mirror
from tfdist.parameter_server.protocol.gradients import Shapes
from tfdist.parameter_server.protocol.state import HeldRows


def test_newer_values_have_a_newer_edition():
    shapes = Shapes([(2, 2), (1,)], [np.dtype(np.float32)] * 2)
    mirror = Mirror([HeldRows("a", 0, 2, 2), HeldRows("b", 0, 1, 1)], shapes, {})
    editions = []
    for number in (1, 2):
        mirror.put([np.full(5, number, np.float32)], 3 * number)
        editions.append(mirror.edition)
    assert editions[0] < editions[1]
    assert mirror.iterations == 6
    newer = mirror.since(editions[0], (0,))
    assert newer.kinds == ("dense", "dense")
    assert newer.vectors[0].tolist() == [2.0] * 5
    assert [array.shape for array in mirror.arrays()] == [(2, 2), (1,)]
