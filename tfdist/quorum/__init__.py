"""Rounds among the processes that are there: a quorum is enough, and processes come and go."""
