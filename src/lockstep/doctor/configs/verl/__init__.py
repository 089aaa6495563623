"""verl's command lines and YAML."""
