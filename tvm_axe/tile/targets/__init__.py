"""Targets of tile programs, a folder each."""
