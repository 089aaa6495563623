"""How an answer looks: on the terminal, as a page."""
