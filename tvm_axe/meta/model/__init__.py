"""The cost model, what it is told of a candidate, and what it is worth."""
