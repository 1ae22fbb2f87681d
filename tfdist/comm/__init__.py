"""Transport of bytes between processes."""
