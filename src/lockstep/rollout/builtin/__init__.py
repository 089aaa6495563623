"""Lockstep's own rollout engine: any causal LM of transformers, continuous batching, shared prompts."""

from lockstep.rollout.builtin.engine import BuiltinEngine

__all__ = ["BuiltinEngine"]
