"""Advantages, importance weights, losses and their aggregation: pure tensor functions."""
