"""From evidence to verdicts: which processes hold up the others, and why."""
