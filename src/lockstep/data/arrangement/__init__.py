"""How rows of unequal ranks are arranged."""
