"""A process's part in its job: the start, the world of processes that train together, and the end."""
