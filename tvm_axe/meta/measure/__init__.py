"""Measuring candidates: building and running them in processes of their own, and judging their results."""
