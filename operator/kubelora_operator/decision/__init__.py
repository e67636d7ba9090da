"""The pure part: from a snapshot of the cluster to a plan."""
