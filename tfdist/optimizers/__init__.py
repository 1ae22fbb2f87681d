"""What is added to the optimizer of a script that shares its data out itself, as Horovod's do."""
