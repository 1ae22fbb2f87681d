"""A parameter server: its shards and tables, and the replication of its state to a follower.

Each server's state has two copies: one process leads, another one follows and takes over when the leader dies.

The leader's state depends only on what it hears: messages of workers, and reports that workers are lost or have come.
It sends all of that to its follower, in the same order, and answers a worker only when the follower has received what
led to the answer. So whatever a worker has been told is on two machines (primary-backup replication of a state machine;
Schneider 1990).
"""
