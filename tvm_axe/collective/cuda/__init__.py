"""The engine ``"cuda"``: the devices of a mesh are the GPUs of this machine."""
