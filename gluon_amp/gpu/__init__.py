"""What MXNet's GPU code does for a network, recorded without a GPU."""
