"""Everything that is checked and decided before a process starts."""
