"""Changes of Keras that all strategies need: data, steps, losses, metrics, variables, optimizers, callbacks, files."""
