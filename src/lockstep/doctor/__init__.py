"""Preflight checks, config advice, and the diagnosis of a failed job from its logs, dumps and incidents."""
