"""What the variables in an environment really do: a table that is data, and the findings that follow from it."""
