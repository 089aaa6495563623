"""PyTorch's flight-recorder dumps as evidence and verdicts: `explain_dumps.read_dumps(folder)`."""
