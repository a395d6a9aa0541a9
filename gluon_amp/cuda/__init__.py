"""Records the calls of MXNet's GPU code for a network, without a GPU."""
