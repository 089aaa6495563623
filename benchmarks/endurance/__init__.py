"""The endurance benchmark: real runs with a fault in every tenth step, for hours, and what is left of them."""
