"""Embeddings without a fixed size: their rows on the servers, and how workers look them up."""
