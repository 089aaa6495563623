"""Advantages, losses, KL and aggregation: pure tensor functions."""
