"""Many runs: a grid of overrides times seeds, each run in a process of its own, on a cluster, or chosen by a search."""
