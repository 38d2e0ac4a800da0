"""The operators of streaming programs: their shape rules and what they do, one module a family.

Programs use them through the methods of `Stream` and `StreamProgram`. Source: Streaming Tensor Programs (arXiv
2511.07776), section 3.2 and Table 2.
"""
