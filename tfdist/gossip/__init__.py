"""Gossip: processes train on their own, and each averages its weights with those of a few others; none is special.

Who averages with whom and with which weights is a topology (`topologies`). What is sent along the lines between them
(`lines`, `messages`) is a process's weights or what they differ by from those that were sent before (`encodings`). The
exchange is in rounds in which each waits for its neighbours (`rounds`), with a bound on how old a neighbour's weights
may be (`bounded`), or in pairs whenever both come to it (`pairs`). `course` is the course of the exchanges of one
optimizer. `tfdist.GossipStrategy` trains in this way.
"""

from tfdist.gossip.topologies import Complete, ExponentialGraph, Graph, RandomPairs, Ring, Topology

__all__ = ["Complete", "ExponentialGraph", "Graph", "RandomPairs", "Ring", "Topology"]
