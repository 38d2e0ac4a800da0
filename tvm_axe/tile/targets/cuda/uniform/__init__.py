"""The uniform model: every warp of a block loads and computes."""
