"""Console, log and metrics of a running run."""
