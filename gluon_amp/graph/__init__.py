"""A symbol as Python objects; what runs in which type; what a device runs."""
