"""Weights from the trainer's device into the engines', bucket by bucket, without a way through host memory."""
