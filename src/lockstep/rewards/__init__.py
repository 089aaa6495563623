"""Rewards: verifiers, users' functions, HTTP servers and judges, run in a pool of scorer processes."""
