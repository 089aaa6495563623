"""accelerate's YAML."""
