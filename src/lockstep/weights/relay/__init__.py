"""Weights through host memory to engines on other nodes: one relay process per node."""
