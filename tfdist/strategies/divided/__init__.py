"""State that is divided among processes: variables that another process holds, and optimizers that update some."""
