"""The public layers, as users write them."""

import keras
import numpy as np

import tfdist


def test_dynamic_embedding_trains_rows_of_any_key():
    layer = tfdist.layers.DynamicEmbedding(
        8,
        initial=tfdist.layers.InitialRows(scale=0.0),
        policy=tfdist.layers.RowPolicy(max_rows=100),
        optimizer="adagrad",
    )
    model = keras.Sequential([keras.layers.Input((3,), dtype="int64"), layer, keras.layers.Flatten()])
    model.compile("adam", "mse")
    keys = np.array([[2**62, -5, 0], [7, 7, 7]])
    model.fit(keys, np.ones((2, 24)), verbose=0)
    exported_keys, rows = layer.export()
    assert exported_keys.tolist() == [-5, 0, 7, 2**62]
    assert rows.shape == (4, 8)
    again = tfdist.layers.DynamicEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (rows > 0).all()
