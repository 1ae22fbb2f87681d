"""Options that users choose and every task knows: modes, pushes, servers, and the rows that embeddings keep."""
