"""MXNet's CUDA build: kernels and libraries for newer GPUs."""
