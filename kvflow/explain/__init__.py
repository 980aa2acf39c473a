"""What a transfer costs, who holds what, and what simpler formulas would have got wrong."""
