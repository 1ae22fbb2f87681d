"""What users choose, as every task knows it: when updates are applied, what is pushed, which rows embeddings keep."""
