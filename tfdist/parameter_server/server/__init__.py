"""A server: the shards and tables that it has, and a copy of its state on another one.

Two copies of each server's state: one server leads, another one follows and takes over when the first one dies.

The leader's state is a function of what it hears: messages of workers, and that workers are lost or have come. It sends
all of that to its follower, in this order, and answers a worker only when the follower has what the answer is about.
So whatever a worker has been told is on two machines (primary-backup replication of a state machine; Schneider 1990).
"""
