"""Parameter servers: shards of variables, the messages between workers and servers, and when an update counts."""
