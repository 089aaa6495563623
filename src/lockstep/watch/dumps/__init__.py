"""PyTorch's flight-recorder dumps as evidence: `read.read_dumps(folder)`."""
