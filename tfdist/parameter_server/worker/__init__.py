"""The worker's side: connections to servers, sessions for models, and the worker's copies of values."""
