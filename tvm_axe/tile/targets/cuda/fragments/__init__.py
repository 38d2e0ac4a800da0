"""Tiles in registers: their layouts, and the code of what threads do with them by themselves."""
