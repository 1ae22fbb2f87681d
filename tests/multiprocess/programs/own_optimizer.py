"""An optimizer of a user's; see `tests/multiprocess/test_serve.py`."""

import keras


@keras.saving.register_keras_serializable(package="own")
class Halved(keras.optimizers.Adam):
    """Makes half of the updates of Adam."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)
