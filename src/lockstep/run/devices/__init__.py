"""The devices that roles share, and the order in which they use them."""
