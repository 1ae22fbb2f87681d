"""Hogwild!: variables in memory that workers on the server's machine change directly, without locks.

Recht, Ré, Wright and Niu, *Hogwild!: a lock-free approach to parallelizing stochastic gradient descent*, NeurIPS 2011.
"""
