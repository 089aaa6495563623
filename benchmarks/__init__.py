"""Lockstep side by side with its peer: `script/benchmark`, described in docs/performance.md."""
