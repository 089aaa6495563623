"""Weights from the trainer's GPUs into the engines', bucket by bucket, without a copy in host memory."""
