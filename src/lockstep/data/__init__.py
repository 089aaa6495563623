"""Datasets, chat templates, samples, and packing into forests and micro-batches."""
