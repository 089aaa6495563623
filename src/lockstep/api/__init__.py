"""Lockstep from Python: what `import lockstep` offers."""
