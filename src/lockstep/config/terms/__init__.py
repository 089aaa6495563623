"""The reward terms that need no user code, by what they judge."""
