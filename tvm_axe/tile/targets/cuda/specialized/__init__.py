"""The specialized model: a producer warp that loads, warpgroups that multiply and compute."""
