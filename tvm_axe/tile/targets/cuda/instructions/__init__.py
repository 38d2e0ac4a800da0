"""The instructions that tile operations become, a module each."""
