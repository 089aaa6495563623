"""The forward passes of every kind of trainer: a model's outputs for targets, evaluations, and what is kept of them."""
