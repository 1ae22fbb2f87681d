"""Embeddings whose rows are in tables on parameter servers."""
