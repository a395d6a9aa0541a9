"""What float16 does to every tensor of a network."""
