"""An independent judge of barriers, which reads from a device's module what its calls touch between two of them."""

import tvm
import tvm_ffi
from tvm import relax, tirx

PULLS, PUSHES = {"reduce_scatter", "all_to_all", "all_reduce"}, {"all_gather", "all_reduce"}


def _written(func):
    """Which parameters a kernel writes, by the stores in it."""
    stores = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, stores.append))
    return [any(store.buffer.same_as(param) for store in stores) for param in func.params]


def _touches(module, call, views):
    """(tensor, whether through peers, whether written) of a call."""
    tensors = [arg if isinstance(arg, relax.Var) else None for arg in call.args]
    if isinstance(call.op, tvm.ir.GlobalVar):
        writes = _written(module[call.op])
    else:
        kind = str(call.op.global_symbol).removeprefix("axe.")
        assert kind in PULLS | PUSHES | {"copy"}, kind
        writes = [False, True]
    found = []
    for var, write in zip(tensors, writes):
        if var is not None and var in views:
            found.append((*views[var], write))
    return found


def conflicts(shared, name):
    """The pairs of calls between two barriers that touch a tensor on one device, one of them writing, one a peer's."""
    module, function = shared.module, shared.functions[name]
    func = module[name]
    params = func.params[len(function.sizes) :]
    views = {var: (tensor, view != "slab") for var, (tensor, view) in zip(params, function.arguments)}
    since, found, flying = [], [], []  # what runs beside goes on until it is joined, whatever barriers there are
    for block in func.body.blocks:
        for binding in block.bindings:
            call = binding.value
            if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.GlobalVar | relax.ExternFunc):
                continue
            symbol = str(call.op.global_symbol) if isinstance(call.op, relax.ExternFunc) else ""
            if symbol == "axe.barrier":
                since = []
                continue
            if symbol == "axe.join":
                since += flying
                flying = []
            if symbol in ("axe.fork", "axe.join"):
                continue
            own = _touches(module, call, views)
            # Copies of one fork are of different rows, or to different peers.
            for other, touched in since + (flying if symbol != "axe.copy" else []):
                for tensor, peers, write in own:
                    for before, by_peers, wrote in touched:
                        if tensor == before and (write or wrote) and (peers or by_peers):
                            found.append((str(other), str(call), tensor))
            (flying if symbol == "axe.copy" else since).append((call.op, own))
    return found
