"""The devices that replicas and variables are on."""
