"""`keras.distribution` on TensorFlow: its devices are the processes of a job, its distributions are strategies.

`enabling` puts it in place. `devices` answers which devices there are, `layouts` what a distribution says of a model's
weights and outputs, `current` makes the strategy of a distribution and lets models train under it.
"""
