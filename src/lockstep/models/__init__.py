"""Loading models and adapters, the log-probability head, and attention over forests."""
