"""Tile programs as streaming programs, in steps: `translating` has `from_tile`, which is what programs call.

`blocks` reads a program as nests of loops (`points`) with steps in them (`step`, made by `steps` and `parallels`), each
a function of whole tiles in numpy (`expressions`), and says which contents of tiles go from step to step. `boxes` finds
the matrices whose tiles are what is moved. `building` puts loads, functions (`folding`) and stores into a graph.
"""
