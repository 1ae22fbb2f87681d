"""Collective algorithms, one file each, as schedules over a Communicator."""
