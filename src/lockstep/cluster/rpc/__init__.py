"""Typed calls from the controller to its worker processes."""
