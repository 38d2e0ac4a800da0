"""Tile programs on CUDA GPUs; `models` chooses how a block works."""
