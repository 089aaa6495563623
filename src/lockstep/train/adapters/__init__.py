"""What the kinds of trainers share about adapters, however they shard a model."""
