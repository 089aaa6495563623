"""Worker processes: typed calls to them, their placement on nodes, local clusters and Ray."""
