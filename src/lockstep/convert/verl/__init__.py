"""The rules of verl."""
