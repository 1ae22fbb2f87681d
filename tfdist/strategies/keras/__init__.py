"""What any strategy needs of Keras: data, steps, losses, metrics, variables, optimizers, callbacks, files."""
