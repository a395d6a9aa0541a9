"""Symbols as Python graphs, the type of each operator, and the graph that a device runs."""
