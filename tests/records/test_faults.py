"""Lines are checked before upstream reads them: what the package writes passes, what is wrong is named."""

from __future__ import annotations

import base64
import json
from functools import cache

import pytest
import tvm
import written
from tvm.s_tir import meta_schedule as ms

from tvm_axe import _tvm
from tvm_axe.records.database import RECORDS, WORKLOADS, find_databases
from tvm_axe.records.faults import entry_fault, workload_fault
from tvm_axe.records.shipped import SHIPPED


def encoded(graph) -> str:
    raw = (graph if isinstance(graph, str) else json.dumps(graph)).encode()
    return json.dumps(["1", base64.b64encode(len(raw).to_bytes(8, "little") + raw).decode()])


@pytest.mark.parametrize("part", [written.programs, written.kernels, written.shipped])
def test_every_module_that_the_package_writes_is_accepted(part):
    faults, seen = {}, 0
    for name, mod in part():
        mods = [mod]
        if part is not written.kernels:  # tile programs have no blocks to schedule
            mods += [written.drawn(mod, seed).mod for seed in range(2)]
        for variant in mods:
            seen += 1
            line = json.dumps([str(text) for text in ms.database.Workload(variant).as_json()])
            if (fault := workload_fault(line)) is not None:
                faults[name] = fault
            again = tvm.ir.save_json(tvm.ir.load_json(tvm.ir.save_json(variant)))
            if (fault := workload_fault(encoded(again))) is not None:
                faults[f"{name}, read and written again"] = fault
    assert seen > 15 and not faults


def test_every_trace_that_schedules_write_is_accepted(matmul):
    modules = [*written.programs(), ("matmul", tvm.IRModule({"main": matmul(6, 8, 12)}))]
    faults, instructions = {}, set()
    for name, mod in modules:
        for seed in range(4):
            trace = _tvm.plain(written.drawn(mod, seed, steps=10).trace.as_json())
            instructions |= {kind for kind, *_ in trace[0]}
            if (fault := entry_fault(json.dumps([0, [trace, [1.0], {"kind": "llvm"}, []]]))) is not None:
                faults[name, seed] = fault
    assert not faults
    assert {"Split", "SamplePerfectTile", "SampleCategorical", "CacheRead", "Annotate"} <= instructions


def test_every_shipped_line_is_accepted():
    folders = find_databases(SHIPPED)
    for name, fault in ((WORKLOADS, workload_fault), (RECORDS, entry_fault)):
        lines = [line for folder in folders for line in (folder / name).read_text().splitlines()]
        assert len(lines) >= 44 and [why for line in lines if (why := fault(line))] == []


@cache
def graph_text(func) -> str:
    return tvm.ir.save_json(tvm.IRModule({"main": func}))


@pytest.fixture
def graph(matmul):
    return json.loads(graph_text(matmul(4, 6, 8)))


def _first(graph, kind):
    return next(n for n, node in enumerate(graph["nodes"]) if node["type"] == kind)


def _set(kind, name, value):
    def change(graph):
        graph["nodes"][_first(graph, kind)]["data"][name] = value

    return change


def _to(kind, name, other):
    """Have a field refer to the first node of another type."""

    def change(graph):
        graph["nodes"][_first(graph, kind)]["data"][name] = _first(graph, other)

    return change


def _extent(value):
    def change(graph):
        extent = graph["nodes"][_first(graph, "tirx.For")]["data"]["extent"]
        graph["nodes"][graph["nodes"][extent]["data"]["value"]]["data"] = value

    return change


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda g: g.update(root_index=10**6), "root_index: 1000000 is no node"),
        (lambda g: g["nodes"][3].update(type="ir.GlobalVax"), 'node 3 ("ir.GlobalVax"): there is no such type'),
        (_set("prim.Add", "a", -1), "a: -1 isn't the number of a node before it"),
        (_set("prim.Add", "a", 10**9), "a: 1000000000 isn't the number of a node before it"),
        (_set("prim.Add", "a", True), "a: true isn't the number of a node before it"),
        (_to("prim.Add", "a", "None"), 'a: node 0 is of the type "None", not ir.Expr'),
        (_to("prim.Add", "ty", "None"), 'ty: node 0 is of the type "None", not ir.Type'),
        (_to("tirx.BufferStore", "buffer", "ffi.String"), "not ir.Var"),
        (lambda g: g["nodes"][_first(g, "prim.Add")]["data"].pop("b"), "b: is missing"),
        (_set("prim.Add", "c", 1), "c: is no field of it"),
        (_set("ir.PrimType", "dtype", "int63"), 'dtype: "int63" is no dtype'),
        (_set("tirx.For", "kind", 7), "7 is no kind of loop"),
        (_set("tirx.For", "kind", 4), "thread_binding: is not there for a loop of the kind 4"),
        (_set("tirx.For", "kind", "0"), 'kind: "0" is no 32-bit integer'),
        (_set("tirx.IterVar", "iter_type", -3), "-3 is no kind of dimension"),
        (_extent(0), "an extent of 0"),
        (_extent(-4), "an extent of -4"),
        (_extent(2**60), "1152921504606846976 is out of the range of int32"),
        (_to("prim.Add", "b", "ir.IntImm"), "a is of the type float32, and b of"),
        (_to("prim.Mul", "ty", "ir.Type"), "the result: node"),
        (_set("tirx.BufferType", "data_alignment", 3), "data_alignment: 3"),
    ],
)
def test_a_graph_that_upstream_would_follow_is_named(graph, change, said):
    assert workload_fault(encoded(graph)) is None
    change(graph)
    fault = workload_fault(encoded(graph))
    assert fault is not None and fault.startswith("function: ") and said in fault


def test_a_cycle_is_named(graph):
    number = _first(graph, "prim.Add")
    graph["nodes"][number]["data"]["a"] = number
    assert f"a: {number} isn't the number of a node before it" in workload_fault(encoded(graph))


@pytest.mark.parametrize("kind", ["FloorDiv", "FloorMod", "Div", "Mod"])
def test_a_division_by_zero_is_named(kind):
    x = tvm.tirx.Var("x", "int32")
    func = tvm.tirx.PrimFunc([x], tvm.tirx.Evaluate(getattr(tvm.tirx, kind)(x, tvm.tirx.const(7, "int32"))))
    text = tvm.ir.save_json(tvm.IRModule({"main": func}))
    assert workload_fault(encoded(text)) is None
    graph = json.loads(text)
    (seven,) = (node for node in graph["nodes"] if node == {"type": "int", "data": 7})
    seven["data"] = 0
    assert f"(prim.{kind}): divides by zero" in workload_fault(encoded(graph))


TILE = ["SamplePerfectTile", ["l1"], [2, 64], ["v3", "v4"]]
GOOD = [["GetSBlock", [], ["b", "main"], ["b0"]], ["GetLoops", ["b0"], [], ["l1", "l2"]], TILE]
GOOD += [["Split", ["l1", "v3", "v4"], [True, False], ["l5", "l6"]], ["Parallel", ["l5"], [], []]]
ENTRY = [0, [[GOOD, [[2, [4, 8]]]], [0.5], {"kind": "llvm"}, [["TENSOR", "float32", [4, 6]]]]]


@pytest.mark.parametrize(
    "path, value, said",
    [
        ((0,), -1, "workload: -1 is no line's number"),
        ((0,), True, "workload: true is no line's number"),
        ((1, 0, 0, 0, 0), "GetSBlocc", "there is no such instruction"),
        ((1, 0, 0, 1, 1), [], "has 0 inputs"),
        ((1, 0, 0, 1, 1), ["q7"], '"q7" is the name of no value'),
        ((1, 0, 0, 2, 1), ["b0"], '"b0" is of another sort than it takes'),
        ((1, 0, 0, 2, 2), [3, 64], "gives 2 values, not 3"),
        ((1, 0, 0, 2, 2), [2, "64"], 'attributes[1]: "64" isn\'t a whole number'),
        ((1, 0, 0, 2, 2), [2, 0], "attributes[1]: 0 isn't positive"),
        ((1, 0, 0, 3, 1), ["l1", 0, 4], "inputs[1]: 0 is no extent"),
        ((1, 0, 0, 3, 3), ["l5"], "gives 1 values, not 2"),
        ((1, 0, 0, 3, 3), ["l1", "l6"], '"l1" isn\'t a new name'),
        ((1, 0, 0, 3, 2), [None, False], "isn't a truth value"),
        ((1, 0, 1), [[2, [4, 0]]], "isn't 2 positive factors"),
        ((1, 0, 1), [[2, [4]]], "isn't 2 positive factors"),
        ((1, 0, 1), [[2, [2**30, 2**30]]], "has a product that no loop has"),
        ((1, 0, 1), [[9, [4, 8]]], "isn't the number of an instruction"),
        ((1, 1), [], "run_secs: [] isn't a list of times"),
        ((1, 1), ["x"], 'run_secs: "x" is no time'),
        ((1, 1), [-1.0], "run_secs: -1.0 is no time"),
        ((1, 2), 7, "target: 7 is no object"),
        ((1, 3), [["TENSOR", "float33", [4]]], '"float33" is no dtype'),
        ((1, 3), [["TENSOR", "float32", [-4]]], "[-4] is no shape"),
        ((1, 3), [["TENSOR", "float32"]], "isn't TENSOR, a dtype and a shape"),
    ],
)
def test_a_record_that_upstream_would_follow_is_named(path, value, said):
    entry = json.loads(json.dumps(ENTRY))
    assert entry_fault(json.dumps(entry)) is None
    part = entry
    for at in path[:-1]:
        part = part[at]
    part[path[-1]] = value
    assert said in entry_fault(json.dumps(entry))


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"a": 1, "a": 2}', '["\\ud800", ""]', f"[{10**30}]", "[1e999]", "[NaN]"]
)
def test_text_that_parsers_read_in_several_ways_is_refused(text):
    assert workload_fault(text) and entry_fault(text)
