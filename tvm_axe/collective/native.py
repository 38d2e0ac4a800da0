"""The barrier compiled: what `sync.Control` does, as long as nothing goes wrong, without Python.

A worker arrives with a store to its own word and a system call that wakes who sleeps on it. Then it looks at the words
of the others a bounded number of times (`SPINS`), sleeps until the word changes, at most `sync.SLICE`, and leaves what
isn't settled by then (a peer that is late, dead or has called the command off) to the slow path in Python, which knows
the deadline and whom to name.

Looking first pays because to sleep and be woken takes some 20 microseconds, the store and its way to the other core
less than one. Microseconds a round of a 4 KiB all-gather and a barrier, two workers on two cores (medians of means over
12 turns, each number of looks in each turn), with as many other processes computing without end:

| others | none | 300 looks | 1000 | 3000 | 20, sched_yield between | 200 |
|---|---|---|---|---|---|---|
| 0 | 21.5 | 0.5 | 0.5 | 0.5 | 0.5 | 0.5 |
| 1 | 6.0 | 12 | 0.5 | 0.5 | 0.5 | 4.7 |
| 2 | 5.8 | 6.4 | 15 | 0.5 | 15 | 112 |

The means of the last row are 13, 6.5, 21, 24, 27 and 112: on busy cores looking costs little while it is short, but who
gives its core away with sched_yield gets it back after the other's whole time slice. So the looks are 1000, about as
long as a sleep takes, with the processor's pause instruction between them; and none with fewer cores than workers,
where the peer may be waiting for this very core.

LLVM keeps the loads in the loops: the instructions and system calls between them may change any memory, for all it
knows. Memory order is x86-64's, see `sync`. The words count in 32 bits, wrapping around, and the compiler takes it for
impossible that a sum of two of them does; so they are subtracted in 64 bits and the difference is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import PointerType, PrimType
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from tvm_axe.collective.sync import FUTEX_WAIT, FUTEX_WAKE, SYS_FUTEX, Control

SPINS = 1000  # looks at a word before sleeping


MEETINGS = ("barrier", "arrive", "wait")


def meeting(name: str, numbers: Sequence[int], control: Control, rank: int, spins: int) -> PrimFunc:
    """Build the function () -> None that does worker `rank`'s part of one of `MEETINGS`.

    Parameters
    ----------
    name : str
        "arrive" says that what the worker wrote and read until now is done; "wait" waits until all have arrived as
        often as it, less a number of times; "barrier" does the one and then the other.
    numbers : sequence of int
        For "wait", that number.
    control : Control
        Where the words are; their addresses are constants of the function.
    rank : int
        The worker.
    spins : int
        How often to look at a word before sleeping.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        if name != "wait":
            _arrive(control, rank)
        if name != "arrive":
            (behind,) = numbers or (0,)
            _wait(control, rank, behind, spins)
    return builder.get()


def _arrive(control: Control, rank: int) -> None:
    word = _word(control.arrival_address(rank))
    T.buffer_store(word, _plus(word[0], 1), [0])
    _futex(word, FUTEX_WAKE, T.int64(0x7FFFFFFF))


def _wait(control: Control, rank: int, behind: int, spins: int) -> None:
    generation = T.Bind(_plus(_word(control.arrival_address(rank))[0], -behind))
    peers = [_word(control.arrival_address(peer)) for peer in control.ranks if peer != rank]
    for word in peers:
        with T.serial(spins):
            with T.If(_reached(word, generation)), T.Then():
                T.evaluate(T.break_loop())
            T.evaluate(T.call_llvm_intrin("void", "llvm.x86.sse2.pause"))
        seen = T.Bind(word[0])
        called_off = _word(control.abort_address)[0] != T.uint32(0)
        with T.If(T.Not(T.Or(_reached(word, generation), called_off))), T.Then():
            _futex(word, FUTEX_WAIT, T.Cast("int64", seen), T.int64(control.slice_address))
    for word in peers:
        with T.If(T.Not(_reached(word, generation))), T.Then():
            T.evaluate(T.call_packed("axe.wait", behind))


def _word(address: int) -> Buffer:
    pointer = T.Bind(T.reinterpret(PointerType(PrimType("uint32"), "global"), T.int64(address)))
    return T.decl_buffer((1,), "uint32", data=pointer)


def _plus(word: Expr, number: int) -> Expr:
    return T.Cast("uint32", T.Cast("int64", word) + T.int64(number))


def _reached(word: Buffer, generation: Expr) -> Expr:
    """Whether the word isn't before the generation, wrapping around."""
    return T.Cast("int32", T.Cast("int64", generation) - T.Cast("int64", word[0])) <= T.int32(0)


def _futex(word: Buffer, operation: int, *arguments: Expr) -> None:
    call = (T.int64(SYS_FUTEX), T.address_of(word[0]), T.int64(operation), *arguments)
    T.evaluate(T.call_extern("int64", "syscall", *call))
