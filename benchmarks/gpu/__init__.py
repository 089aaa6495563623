"""What needs a GPU: tests, and the measurements whose table is in docs/gpu.md. `script/gpu` runs it."""
