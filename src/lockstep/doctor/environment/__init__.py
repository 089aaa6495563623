"""What environment variables really do: a table as data files, and findings derived from it."""
