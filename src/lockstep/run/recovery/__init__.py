"""Recovery by role: what failed, what is done about it, and who does it."""
