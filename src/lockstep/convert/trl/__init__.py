"""The rules of TRL."""
