import numpy as np

from tests.parameter_server.worker.test_session import SHAPES, model_of
from tfdist.parameter_server.hierarchy.splitting import split_by_root
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes

WHOLE = Shapes(SHAPES, [np.dtype(np.float32)] * 4)


def arrays():
    generator = np.random.default_rng(0)
    return [np.asarray(generator.normal(size=shape), np.float32) for shape in SHAPES]


def test_single_root_gets_all_gradients():
    gradients = PushedGradients(("dense",) * 4, WHOLE.layout().vectors(arrays()))
    assert split_by_root(gradients, WHOLE, model_of(1)) == [gradients]


def test_split_dense_gradients_join_to_the_original():
    model, given = model_of(2), arrays()
    parts = split_by_root(PushedGradients(("dense",) * 4, WHOLE.layout().vectors(given)), WHOLE, model)
    split = [
        list(shapes.layout().arrays(gradients.vectors).values())
        for shapes, gradients in zip(model.shapes, parts, strict=True)
    ]
    for array, other in zip(model.whole(split), given, strict=True):
        np.testing.assert_array_equal(array, other)


def test_rows_go_to_the_root_that_has_them():
    model, given = model_of(2), arrays()
    kinds = ("sparse", "none", "dense", "none")
    indices = np.asarray([3, 999, 3, 500])
    rows = np.asarray(np.arange(800).reshape(4, 200), np.float32)
    dense = WHOLE.layout(kinds).vectors([None, None, given[2], None])
    parts = split_by_root(PushedGradients(kinds, dense, {0: (rows, indices)}), WHOLE, model)
    total = np.zeros(SHAPES[0], np.float32)
    scalars = []
    for shard, gradients in zip(model.dealing.shards, parts, strict=True):
        assert gradients.kinds == tuple(kinds[part.variable] for part in shard)
        scalars += [vector.tolist() for vector in gradients.vectors if vector.size]
        for place, (some, at) in gradients.sparse.items():
            np.add.at(total[shard[place].begin : shard[place].end], at, some)
    assert scalars == [[float(given[2])]]
    expected = np.zeros_like(total)
    np.add.at(expected, indices, rows)
    np.testing.assert_array_equal(total, expected)
