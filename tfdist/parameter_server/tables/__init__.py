"""Embeddings without a fixed size: tables of rows on the servers, and the workers' access to them."""
