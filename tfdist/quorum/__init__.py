"""Rounds among the processes that are present: a quorum is enough, and processes may come and go."""
