"""Which rank waits for which in collectives, how long, and how fast data moves."""
