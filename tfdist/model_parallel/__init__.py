"""Models whose layers are on several devices."""
