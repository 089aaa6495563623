"""Reads PyTorch's flight-recorder dumps and diagnoses them: `explain_dumps.explain_dumps(folder)`."""
