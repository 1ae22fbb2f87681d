"""Moving bytes between processes."""
