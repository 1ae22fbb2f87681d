"""Snapshots of servers: files that any number of servers, and NumPy, read again."""
