"""A process in its job: coming up, the world that it is in, and leaving."""
