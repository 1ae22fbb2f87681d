"""Servers of hosts between workers and the root servers: gradients are joined on their way up.

A host's server is a parameter server to the workers of its host, and one worker to the roots. It keeps no optimizer: it
has the newest parameters that came down, and the bookkeeping of its workers' pushes.
"""
