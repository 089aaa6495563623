"""The knowledge base of failures: rules as data files, their schema, and the catalogue made from them."""
