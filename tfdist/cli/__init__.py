"""The `tfdist` command."""
