"""Who waits for whom in collectives, how long, and how fast data moves."""
