"""Snapshots of servers: files that any number of servers can restore, and that NumPy can read."""
