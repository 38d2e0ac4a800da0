"""Random numbers of a counter as a function in LLVM's language, whose words are 64 bits wide with the upper half 0."""

from __future__ import annotations

from tvm_axe.tile.philox import CALL, MULTIPLIERS, ROUNDS, STEPS


def source() -> str:
    """The function in LLVM's language, its rounds one behind the other."""
    lines = [f"define linkonce_odr i32 @{CALL}(i64 %seed, i64 %counter) alwaysinline {{"]
    lines += ["  %a0 = and i64 %counter, 4294967295", "  %b0 = lshr i64 %counter, 32"]
    lines += ["  %c0 = add i64 0, 0", "  %d0 = add i64 0, 0"]
    lines += ["  %k0 = and i64 %seed, 4294967295", "  %l0 = lshr i64 %seed, 32"]
    for r in range(ROUNDS):
        for product, word, by in (("p", "a", MULTIPLIERS[0]), ("q", "c", MULTIPLIERS[1])):
            lines.append(f"  %{product}{r} = mul i64 %{word}{r}, {by}")
            lines.append(f"  %{product}h{r} = lshr i64 %{product}{r}, 32")
        lines += [f"  %x{r} = xor i64 %qh{r}, %b{r}", f"  %a{r + 1} = xor i64 %x{r}, %k{r}"]
        lines += [f"  %y{r} = xor i64 %ph{r}, %d{r}", f"  %c{r + 1} = xor i64 %y{r}, %l{r}"]
        for word, product in (("b", "q"), ("d", "p")):
            lines.append(f"  %{word}{r + 1} = and i64 %{product}{r}, 4294967295")
        for word, by in (("k", STEPS[0]), ("l", STEPS[1])):
            lines.append(f"  %{word}s{r} = add i64 %{word}{r}, {by}")
            lines.append(f"  %{word}{r + 1} = and i64 %{word}s{r}, 4294967295")
    return "\n".join([*lines, f"  %word = trunc i64 %a{ROUNDS} to i32", "  ret i32 %word", "}", ""])
