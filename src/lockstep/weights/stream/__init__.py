"""Sends weights from the trainer's GPUs to the engines' GPUs, bucket by bucket, without a copy in host memory."""
