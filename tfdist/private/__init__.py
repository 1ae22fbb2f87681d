"""What is private in other packages, and used by tfdist: imported in this folder only."""
