"""Who takes part: the cluster's description, the rendezvous, ranks and hosts."""
