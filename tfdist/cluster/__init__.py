"""The tasks of a job: the cluster's description, the rendezvous, ranks and hosts."""
