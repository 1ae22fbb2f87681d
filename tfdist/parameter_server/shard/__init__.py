"""A server's part of a model: variables and their optimizer, and whose updates are counted in it.

`hogwild_store.py`, and the memory that it shares with workers (`protocol/hogwild_memory.py`), are of Recht, Ré, Wright
and Niu, *Hogwild!: a lock-free approach to parallelizing stochastic gradient descent*, NeurIPS 2011.
"""
