"""Recovery from failed workers: which restart, when, and from which state."""
