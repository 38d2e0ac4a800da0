"""Tile kernels take the place of the blocks that chose them.

A nest whose block is annotated ``axe.tile`` (see `tvm_axe.schedule.tile_kernel`) becomes the kernel's programs, lowered
for the target, on the nest's own buffers. A pointwise block in the same nest is computed on the kernel's accumulator,
right before that is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import tvm
from tvm import s_tir, tirx
from tvm.sym import Analyzer
from tvm.target import Target
from tvm_ffi import structural_equal

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL, PROGRAM, WAITS
from tvm_axe.analysis.blocks import NestedBlock, covers, nested_blocks, statements
from tvm_axe.analysis.expressions import substitute, uses
from tvm_axe.analysis.sizes import Extent, are_same, sides, unknown_extents
from tvm_axe.analysis.tree import with_functions
from tvm_axe.errors import InputError, LowerError, ScheduleError, TileError
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines.builder import called_by
from tvm_axe.schedule import TILE
from tvm_axe.schedule.einsum import Einsum
from tvm_axe.schedule.product import Product
from tvm_axe.schedule.tiles import AnyProduct, Choice, choice_of, has_choice, kernel_for, problem_of, product_in
from tvm_axe.tile import lowering
from tvm_axe.tile.backend import tile_backend_of
from tvm_axe.tile.epilogue import Epilogue, with_epilogue
from tvm_axe.tile.kernels import KERNELS, Recipe
from tvm_axe.tile.kernels.kernel import has_variables
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import first_strided
from tvm_axe.tile.sequences import read_function
from tvm_axe.tile.tunable import knobs_in, program_of


def with_tile_kernels(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """The module with tile kernels for the blocks that chose one; itself where none did.

    Raises
    ------
    LowerError
        A block chose a kernel that can't compute it, with the block, the kernel and the rule.
    """
    rewritten = {
        variable: _Rewriter(func, str(variable.name_hint), target).rewritten()
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
        and (KERNEL in (func.attrs or {}) or PROGRAM in (func.attrs or {}) or has_choice(func))
    }
    if not rewritten:
        return mod
    apart: set[str] = set()
    if not tile_backend_of(target).joins_blocks:  # then what calls a kernel goes through its pipeline
        apart = {str(variable.name_hint) for variable, func in rewritten.items() if "s_tir" not in func.attrs}
    callers = {
        variable: _laid_out(func, func.body, dict(func.attrs.items()))
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and variable not in rewritten and apart.intersection(called_by(func))
    }
    return with_functions(mod, {**rewritten, **callers})


def _laid_out(
    func: tirx.PrimFunc,
    body: tirx.Stmt,
    attrs: Mapping[str, Any],
    buffers: Sequence[tirx.Buffer] = (),
    layout: str | None = "default",
) -> tirx.PrimFunc:
    """The function with another body, and layouts of its tensors, which TIRx wants to know: of blocks they have none.

    Host code allocates `buffers` on the GPU, from the runtime's pool, and launches the kernels on one stream.
    """
    tensors = [*filter(tirx.is_buffer_var, func.params), *buffers]
    laid_out = {old: tirx.decl_buffer(list(old.shape), old.dtype, old.name, layout=layout) for old in tensors}
    if buffers:
        body = tirx.SeqStmt([*(tirx.AllocBuffer(laid_out[buffer]) for buffer in buffers), *statements(body)])
    params = [laid_out.get(old, old) for old in func.params]
    made = tirx.PrimFunc(params, substitute(body, laid_out), func.ret_type)
    return made.with_attrs({key: value for key, value in attrs.items() if key != "s_tir"})


def overlaps(mod: tvm.IRModule) -> bool:
    """Whether all functions of a module are tile kernels that wait for what was launched before them.

    Then they may be launched while that still runs (`tvm_axe.machines.Backend.build`).
    """
    return all(WAITS in (func.attrs or {}) for func in mod.functions.values())


class _Rewriter:
    def __init__(self, func: tirx.PrimFunc, name: str, target: Target) -> None:
        self.func, self.name, self.target = func, name, target
        self.root = func.body.block
        self.scratch: list[tirx.Buffer] = []
        self.overlaps = True
        self.attrs = dict(func.attrs.items())

    def rewritten(self) -> tirx.PrimFunc:
        """The function with kernels for its annotated nests."""
        if PROGRAM in self.attrs:
            done = self._program()
        elif KERNEL in self.attrs:
            done = self._whole()
        else:
            done = self._nests(self.root.body)
        body = _in_order(done)
        buffers = [buffer for buffer in self.root.alloc_buffers if uses(body, buffer)] + self.scratch
        params = list(self.func.params)
        others = [str(block.block.name_hint) for stmt in done for block in nested_blocks(stmt)]
        backend = tile_backend_of(self.target)
        if others and not backend.joins_blocks:
            raise LowerError(
                f"{self.name}: the blocks {', '.join(others)} share the function with a tile kernel; on "
                f"{backend.device} valid are blocks that tile kernels compute, and their epilogues: give the "
                "others stages of their own"
            )
        if others or (buffers and backend.joins_blocks):
            root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
            func = tirx.PrimFunc(params, s_tir.SBlockRealize([], True, root), self.func.ret_type)
            return s_tir.renew_defs(func.with_attrs(self.attrs))
        attrs = {**self.attrs, WAITS: True} if self.overlaps else self.attrs
        # What renames the variables of extents leaves those in layouts, which a CPU's code doesn't ask for.
        layout = None if backend.joins_blocks and unknown_extents(self.func) else "default"
        return _laid_out(self.func, body, attrs, buffers, layout)

    def _program(self) -> list[tirx.Stmt]:
        """The tile program that the function stands for, with its knobs as annotated."""
        func = program_of(self.func)
        assert func is not None
        del self.attrs[PROGRAM]
        try:
            program = read_function(func, knobs_in(self.func))
            tensors = dict(zip((tile.name for tile in program.params), self.func.params, strict=True))
            touched = {tile.name for kernel in program.kernels for tile in kernel.params}
            recipe = Recipe(program.kernels, tuple(name for name in tensors if name in touched), ())
            return self._recipe(recipe, tensors, {}, program.name)
        except (InputError, ScheduleError, TileError) as error:
            raise LowerError(f"{self.name}: {error}") from error

    def _whole(self) -> list[tirx.Stmt]:
        """The kernel that computes all of the function."""
        name = str(self.attrs.pop(KERNEL))
        given = [key for key in self.attrs if str(key).startswith(f"{KERNEL}.")]
        problem = {str(key).removeprefix(f"{KERNEL}."): _tvm.plain(self.attrs.pop(key)) for key in given}
        buffers, extents = [*filter(tirx.is_buffer_var, self.func.params)], list[tuple[tirx.Var, tirx.Expr]]()
        for key, at in problem.items():
            if isinstance(at, list):  # what isn't known is some parameter's extent, or a product of several
                problem[key] = _as_variable(prod(buffers[at[0]].shape[dim] for dim in at[1:]), key, extents)
        kernel = KERNELS[name]

        def made(**parameters: int | str) -> list[tirx.Stmt]:
            recipe = kernel.recipe(self.target, problem, **parameters)
            tensors = dict(zip((*recipe.inputs, *recipe.outputs), buffers, strict=True))
            return self._recipe(recipe, tensors, {}, name, dict(extents))

        try:
            many, fewer = made(), kernel.fewer(self.target, problem)
            if fewer is None:
                return many
            few = made(**fewer.parameters)
        except (ScheduleError, TileError) as error:
            raise LowerError(f"{self.name} is computed by the kernel {name}: {error}") from error
        extent = dict(extents)[problem[fewer.extent]]
        return [tirx.IfThenElse(extent <= fewer.most, _in_order(few), _in_order(many))]

    def _nests(self, body: tirx.Stmt) -> list[tirx.Stmt]:
        """What becomes of nests, and of those that are run for some numbers of rows."""
        nests, done = statements(body), list[tirx.Stmt]()
        for nest in nests:
            if isinstance(nest, tirx.IfThenElse) and has_choice(nest):
                few, many = (_in_order(self._nests(branch)) for branch in (nest.then_case, nest.else_case))
                done.append(tirx.IfThenElse(nest.condition, few, many))
            else:
                done += self._nest(nest, [other for other in nests if other is not nest])
        return done

    def _nest(self, nest: tirx.Stmt, others: Sequence[tirx.Stmt]) -> list[tirx.Stmt]:
        blocks = nested_blocks(nest)
        chosen = [block for block in blocks if TILE in block.block.annotations]
        if not chosen:
            if has_choice(nest):
                raise LowerError(
                    f"{self.name}: a block inside another one chose a tile kernel; valid are blocks of a nest, as "
                    "tile_kernel leaves them before blockize or tensorize"
                )
            return [nest]
        main, choice = chosen[0], choice_of(chosen[0].block)
        assert choice is not None  # it has the annotation
        try:
            return self._kernel(main, choice, [block for block in blocks if block is not main], others)
        except (ScheduleError, TileError) as error:
            raise LowerError(f"block {main.block.name_hint!r} chose the kernel {choice}: {error}") from error

    def _kernel(
        self, main: NestedBlock, choice: Choice, others: Sequence[NestedBlock], nests: Sequence[tirx.Stmt]
    ) -> list[tirx.Stmt]:
        for block in (main, *others):
            if not covers(block.realize, block.loops):
                raise ScheduleError(
                    f"block {block.block.name_hint!r} does not run over all of its buffers; valid are shares that the "
                    "devices divide evenly, and blocks without a mask"
                )
        kernel = kernel_for(choice.kernel)
        product = product_in(main.block, kernel.name)
        epilogue = self._epilogue(product, others, nests)
        out = product.c if epilogue is None else epilogue.out
        problem = problem_of(kernel, product, str(out.dtype))
        recipe = kernel.recipe(self.target, problem, **choice.parameters)
        if epilogue is not None:
            recipe = with_epilogue(recipe, epilogue)
        given = {**product.inputs, recipe.outputs[0]: out}
        if epilogue is not None:
            given |= epilogue.inputs
        scalars = product.scalars if isinstance(product, Einsum) else {}
        extents = {}
        if isinstance(product, Product) and has_variables(problem):
            extents = {problem["m"]: tirx.convert(product.height)}
        return self._recipe(recipe, given, scalars, str(main.block.name_hint), extents)

    def _epilogue(
        self, product: AnyProduct, others: Sequence[NestedBlock], nests: Sequence[tirx.Stmt]
    ) -> Epilogue | None:
        """The other block of the nest as what the kernel does to the product."""
        if not others:
            return None
        names = ", ".join(repr(str(block.block.name_hint)) for block in others)
        if len(others) > 1:
            raise ScheduleError(f"its nest holds the blocks {names} too; valid is one pointwise block beside it")
        held = any(buffer.same_as(product.c) for buffer in self.root.alloc_buffers)
        if not held or any(uses(nest, product.c) for nest in nests):
            raise ScheduleError(f"{product.c.name} is used beyond the block {names} in its nest, which is its epilogue")
        return Epilogue.of(others[0].block, product.c)

    def _recipe(
        self,
        recipe: Recipe,
        given: Mapping[str, tirx.Buffer],
        scalars: Mapping[str, tirx.Expr],
        name: str,
        extents: Mapping[tirx.Var, tirx.Expr] = MappingProxyType({}),
    ) -> list[tirx.Stmt]:
        """The lowered programs of a recipe, one after the other, on `given` and on scratch."""
        tensors = dict(given)
        for tensor, (shape, dtype) in recipe.scratch.items():
            tensors[tensor] = tirx.decl_buffer(list(shape), dtype, f"{name}_{tensor}")
            self.scratch.append(tensors[tensor])
        found: list[tirx.Stmt] = []
        for program in recipe.programs:
            made = lowered_on(program, self.target, tensors, scalars, extents)
            self.overlaps = self.overlaps and made.overlaps
            self.attrs |= made.attrs
            found += made.body
        return found


def _in_order(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(list(stmts))


def _as_variable(extent: int | tirx.Expr, name: str, known: list[tuple[tirx.Var, tirx.Expr]]) -> tirx.Var | int:
    """A variable that stands for an extent in a tile program, one for equal ones; the number that it is, if it is one.

    New ones are put into `known`.
    """
    if isinstance(extent, int | tirx.IntImm):
        return int(extent)
    for variable, other in known:
        if structural_equal(other, extent):
            return variable
    known.append((tirx.Var(name, extent.ty), extent))
    return known[-1][0]


class OnBuffers(NamedTuple):
    """A lowered tile program on given buffers: its statements, its function's attributes, and what its plan says."""

    body: list[tirx.Stmt]
    attrs: dict[str, Any]
    overlaps: bool
    resident: int | None

    def function(self, params: Sequence[tirx.Var]) -> tirx.PrimFunc:
        """The function of these parameters that is the program and nothing else."""
        body = self.body[0] if len(self.body) == 1 else tirx.SeqStmt(self.body)
        return tirx.PrimFunc(list(params), body).with_attrs({"tirx.noalias": True, **self.attrs})


def lowered_on(
    program: TileProgram,
    target: Target,
    tensors: Mapping[str, tirx.Buffer],
    scalars: Mapping[str, tirx.Expr],
    extents: Mapping[tirx.Var, tirx.Expr] = MappingProxyType({}),
) -> OnBuffers:
    """Lower a tile program for a target, on a buffer for each tensor and an expression for each scalar, by name.

    What stands for the variables of its tensors' shapes are `extents`.

    Raises
    ------
    ScheduleError
        A buffer isn't dense, or hasn't as many elements as the tensor; a tensor has strides; the program assumes
        something of sizes.
    TileError
        The target can't run the program.
    """
    if program.assumptions:
        given = ", ".join(map(str, program.assumptions))
        raise ScheduleError(
            f"{program.name}: it assumes {given}, which nothing checks in a kernel of another function; valid is a "
            "program of known sizes, or tile.compile"
        )
    strided = first_strided(program.params)
    if strided is not None:
        raise ScheduleError(
            f"{program.name}: {strided}, and buffers of another function are dense; valid is a program of tensors in "
            "row-major order, or tile.compile"
        )
    decided = lowering.plan(program, target)
    lowered = lowering.emit(decided)
    # The kernel is given one number for an extent, not the variables that it is made of.
    named = {var: tirx.Var(str(var.name), extent.ty) for var, extent in extents.items()}
    bound = [tirx.Bind(named[var], extent) for var, extent in extents.items()]
    found: list[tirx.Stmt] = []
    replaced: dict[tirx.Var, tirx.Expr] = {}
    for param, tile in zip(filter(tirx.is_buffer_var, lowered.params), program.params):
        whole, shape = (
            [n if isinstance(n, int) else substitute(n, own) for n in tile.shape] for own in (extents, named)
        )
        replaced[param] = _seen_as(tensors[tile.name], whole, shape, tile.dtype, found)
    replaced |= named
    replaced |= {param: scalars[param.name] for param in lowered.params if not tirx.is_buffer_var(param)}
    attrs = {str(key): value for key, value in lowered.attrs.items() if key != "global_symbol"}
    return OnBuffers([*bound, *found, substitute(lowered.body, replaced)], attrs, decided.overlaps, decided.resident)


def _seen_as(
    buffer: tirx.Buffer, shape: Sequence[Extent], named: Sequence[Extent], dtype: str, before: list[tirx.Stmt]
) -> tirx.Buffer:
    """The buffer as one of that shape and type, of as many bytes; what declares it is put into `before`.

    In `named` extents that aren't known are variables of the program.
    """
    own = sides(buffer.shape)
    is_same = str(buffer.dtype) == dtype
    alike = is_same and are_same(own, shape)
    known = all(isinstance(extent, int) for extent in (*own, *shape))
    if known:
        fits = prod(own) * dtype_bits(str(buffer.dtype)) == prod(shape) * dtype_bits(dtype)
    else:
        fits = is_same and Analyzer().can_prove_equal(prod(own), prod(shape))
    if len(buffer.strides) or not (alike or fits):
        raise ScheduleError(
            f"{buffer.name} has the shape {own} and the strides {list(buffer.strides)}; the kernel takes a dense "
            f"tensor, here of {tuple(shape)}"
        )
    if alike:
        return buffer
    seen = tirx.decl_buffer(list(named), dtype, f"{buffer.name}_{len(before)}")
    before.append(tirx.DeclBuffer(seen, data=buffer.data))
    return seen
