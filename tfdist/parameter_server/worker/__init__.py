"""A worker's side: connections to servers, sessions of models, and what a worker has of them."""
