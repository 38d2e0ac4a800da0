"""TVM, distributed: one layout and schedule language for computation and communication."""

__version__ = "0.1.0"
