"""Random indices, as text: sums, divisions, remainders and products of variables, such as addresses are made of."""

import random
from collections.abc import Sequence


def random_index(
    rng: random.Random, depth: int, variables: Sequence[str], added: Sequence[int | str], divisors: Sequence[int]
) -> str:
    """A number that isn't negative, where none of `variables` and of what may be `added` is; a variable at depth 0."""
    if not depth:
        return rng.choice(variables)
    inner = random_index(rng, depth - 1, variables, added, divisors)
    kinds = [
        f"({inner} + {rng.choice(added)})",
        f"{inner} % {rng.choice(divisors)}",
        f"({inner}) // {rng.choice([2, 3, 4, 6])}",
        f"({inner}) * {rng.choice([1, 2, 4])} + {random_index(rng, depth - 1, variables, added, divisors)}",
    ]
    return f"({rng.choice(kinds)})"
