"""Gossip: processes train on their own, and each averages its weights with those of a few others; none is special.

A topology says which processes average with each other, and with which weights (`topologies`). Along the lines between
them (`lines`, `messages`) a process sends its weights, or their difference from those that it has sent before
(`encodings`). Exchanges take place in rounds in which each process waits for its neighbours (`rounds`), with a bound on
the age of a neighbour's weights (`bounded`), or in pairs whenever both are ready (`pairs`). `course` schedules the
exchanges of one optimizer. `tfdist.GossipStrategy` trains in this way.
"""

from tfdist.gossip.topologies import Complete, ExponentialGraph, Graph, RandomPairs, Ring, Topology

__all__ = ["Complete", "ExponentialGraph", "Graph", "RandomPairs", "Ring", "Topology"]
