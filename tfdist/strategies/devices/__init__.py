"""Which devices replicas and variables are on."""
