"""What a program is: its parameters, blocks and accesses, which dimensions move together, and its annotations."""
