"""Prefix reuse: which rows of a new prompt exist already, and who holds the blocks they lie in."""
