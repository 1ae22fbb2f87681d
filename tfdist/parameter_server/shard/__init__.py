"""A server's part of a model: variables with their optimizer, and the bookkeeping of the workers' pushes.

`hogwild_store.py`, and the memory that it shares with workers (`protocol/hogwild_memory.py`), implement Recht, Ré,
Wright and Niu, *Hogwild!: a lock-free approach to parallelizing stochastic gradient descent*, NeurIPS 2011.
"""
