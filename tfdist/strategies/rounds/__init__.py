"""Strategies whose processes take steps on their own, and exchange weights in rounds."""
