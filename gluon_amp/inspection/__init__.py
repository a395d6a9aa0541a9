"""What a format such as float16 does to every tensor of a network."""
