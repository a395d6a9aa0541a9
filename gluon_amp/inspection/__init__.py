"""Inspection of a network's tensors: how a format such as float16 rounds each of them."""
