"""What scripts/bench_gpu.py measures of packed weights, lists of blocks, attention's gradients and chunks of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

GROUP = 128
"""Weights that share a scale."""

WEIGHTS = {"qkv": (6144, 4096), "up": (28672, 4096), "down": (4096, 14336)}
"""Columns and depth of products of packed weights."""

CHUNKS = {"batch": 8, "length": 4096, "heads": 80, "groups": 1, "dim": 64, "state": 128, "chunk": 256}
"""Of Mamba-2 with 2.7 billion parameters, as TileLang's example has it."""

LATENTS = {"batch": 64, "capacity": 8192, "dim": 512, "rope": 64}
"""Of DeepSeek-V3's attention of 128 heads, one token of each sequence."""

BLOCK = 128
"""Terms, and rows of weights, that share a scale."""

SCALED = {"down": (7168, 2048), "up": (4096, 7168)}
"""Columns and depth of an expert's products in DeepSeek-V3."""

FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The floats of four bits that aren't negative, by their codes."""

HEADS = ((64, 32, 32), (128, 32, 32), (256, 16, 16), (128, 32, 8))
"""Columns of a head, heads, and heads of keys, of attention to 4,096 tokens."""

SPARSE = {"batch": 4, "heads": 32, "kv_heads": 8, "queries": 8192, "keys": 8192, "dim": 128}
"""Attention of which each head sees a part of its own."""

COMPARED = (
    "w4a16_matmul", "w8a16_matmul", "w4a8_matmul", "block_scaled_matmul", "block_sparse_attention",
    "block_sparse_attention_backward", "attention_backward", "mla_decode", "chunk_state", "chunk_scan",
)  # fmt: skip
"""Kernels whose results `compared` looks at."""

Measured = tuple[str, str, dict[str, Any], str, float, bool]
"""A case: its name, the kernel, the problem, the peer, and its work, in bytes or else in floating-point operations."""


def cases() -> Iterator[Measured]:
    """What is measured, in order."""
    for layer, (n, k) in WEIGHTS.items():
        for m in (1, 16, 64, 2048):
            problem = {"m": m, "n": n, "k": k, "group": GROUP, "dtype": "bfloat16"}
            bytes_, flops = n * k / 2 + 2.0 * n * k / GROUP + 2.0 * m * (n + k), 2.0 * m * n * k
            for peer in ("int4pack", "decoded"):
                yield f"w4a16 {layer} {m}x{n}x{k}", "w4a16_matmul", problem, peer, bytes_ if m <= 64 else flops, m <= 64
            if m <= 64:
                name, more = f"w4a16 zeros {layer} {m}x{n}x{k}", n * k / GROUP
                yield name, "w4a16_matmul", {**problem, "zeros": True}, "int4pack", bytes_ + more, True
                floats = {"group": 32, "weights": "float4_e2m1fn", "scale_dtype": "uint8"}
                bytes_ = n * k / 2 + n * k / 32 + 2.0 * m * (n + k)
                yield f"mxfp4 {layer} {m}x{n}x{k}", "w4a16_matmul", {**problem, **floats}, "decoded", bytes_, True
            kinds = {"e4m3 of blocks": ("float8_e4m3fn", GROUP, "float32"), "int8 of channels": ("int8", k, "bfloat16")}
            for said, (kind, group, scale_dtype) in kinds.items():
                problem = {"m": m, "n": n, "k": k, "group": group, "dtype": "bfloat16", "weights": kind}
                problem |= {} if scale_dtype == "bfloat16" else {"scale_dtype": scale_dtype}
                bytes_ = 1.0 * n * k + 4.0 * n * k / group + 2.0 * m * (n + k)
                # What PyTorch makes of the operators is compiled anew for each shape, which takes long.
                for peer in ("decoded", "compiled") if layer == "qkv" and m in (1, 16) else ("decoded",):
                    name = f"w8a16 {said} {layer} {m}x{n}x{k}"
                    yield name, "w8a16_matmul", problem, peer, bytes_ if m <= 64 else flops, m <= 64
    n, k = WEIGHTS["qkv"]
    for m in (16, 128, 2048):
        for dtype, peer in (("int8", "int_mm"), ("float8_e4m3fn", "scaled_mm of channels")):
            for name, group in (("w4a8", GROUP), ("w4a8 of channels", k)):
                problem = {"m": m, "n": n, "k": k, "group": group, "dtype": dtype, "out_dtype": "bfloat16"}
                bytes_, flops = n * k / 2 + 2.0 * n * k / group + 1.0 * m * (k + 2 * n), 2.0 * m * n * k
                few = m <= 16  # of which no product of 8 bits is faster
                name = f"{name} {dtype} {m}x{n}x{k}"
                yield name, "w4a8_matmul", problem, "int4pack" if few else peer, bytes_ if few else flops, few
    for layer, (n, k) in SCALED.items():
        for m in (128, 4096):
            problem = {"m": m, "n": n, "k": k, "dtype": "float8_e4m3fn"}
            bytes_, flops = 1.0 * n * k + m * (k + 2.0 * n), 2.0 * m * n * k
            name = f"block scaled {layer} {m}x{n}x{k}"
            yield name, "block_scaled_matmul", problem, "scaled_mm of blocks", bytes_ if m <= 128 else flops, m <= 128
    for name, problem, product in attentions():  # five products, as FlashAttention-2 counts
        yield f"backward {name}", "attention_backward", problem, "cudnn backward", 5 * product, False
    for block, causal in ((128, False), (128, True), (64, True)):
        width = SPARSE["keys"] // block // 4
        lists = {"query_block": block, "key_block": block, "width": width}
        own = {"mask_batch": SPARSE["batch"], "mask_heads": SPARSE["heads"], "causal": causal}
        problem = {**SPARSE, **lists, **own, "dtype": "bfloat16"}
        seen = sum(min(width, row + 1) if causal else width for row in range(SPARSE["queries"] // block))
        product = 2.0 * SPARSE["batch"] * SPARSE["heads"] * seen * block**2 * SPARSE["dim"]  # of blocks in lists, whole
        name = f"4x32/8x8192x128 of {block}" + (" causal" if causal else "")
        yield f"sparse {name}", "block_sparse_attention", problem, "flex", 2 * product, False
        problem = {**problem, "query_width": SPARSE["queries"] // block}
        kernel = "block_sparse_attention_backward"
        yield f"sparse backward {name}", kernel, problem, "flex backward", 5 * product, False
    whole = LATENTS["dim"] + LATENTS["rope"]
    for heads in (16, 128):  # of eight devices', and all; of few reading the vectors takes longer than multiplying
        vectors, few = LATENTS["batch"] * LATENTS["capacity"], heads < 128
        bytes_, flops = 2.0 * vectors * whole, 2.0 * vectors * heads * (whole + LATENTS["dim"])
        problem = {**LATENTS, "heads": heads, "dtype": "bfloat16"}
        yield f"mla 64x{heads}x8192x512", "mla_decode", problem, "torch", bytes_ if few else flops, few
    tokens, inner = CHUNKS["batch"] * CHUNKS["length"], CHUNKS["heads"] * CHUNKS["dim"]
    chunks = {**CHUNKS, "dtype": "bfloat16"}
    state = 2.0 * tokens * inner * CHUNKS["state"]
    yield "chunk_state 8x4096x80", "chunk_state", chunks, "torch", state, False
    yield "chunk_scan 8x4096x80", "chunk_scan", chunks, "torch", state + tokens * inner * CHUNKS["chunk"], False


def attentions() -> Iterator[tuple[str, dict[str, Any], float]]:
    """Attention and its gradients: a name, the problem, and the operations of one product."""
    for dim, heads, kv_heads in HEADS:
        for causal in (False, True):
            shape = {"batch": 4, "heads": heads, "kv_heads": kv_heads, "queries": 4096, "keys": 4096, "dim": dim}
            of = str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"
            name = f"4x{of}x4096x{dim}" + (" causal" if causal else "")
            product = 2.0 * 4 * heads * 4096**2 * dim / (2 if causal else 1)
            yield name, {**shape, "dtype": "bfloat16", "causal": causal}, product


def completed(name: str, problem: Mapping[str, Any], made: dict[str, Any]) -> None:
    """Give tensors of random numbers the values that a kernel needs: forward results, scales, decays."""
    import torch

    if problem.get("scale_dtype") == "uint8":
        made["scales"] = torch.randint_like(made["scales"], 118, 124)
    elif name in ("w4a16_matmul", "w8a16_matmul"):
        made["scales"] = (made["scales"].abs() * 0.02 + 0.01).to(made["scales"].dtype)
        if "points" in made:
            made["points"] = made["points"] & 15
        if made["B"].dtype == torch.int8:
            made["B"] = torch.randint_like(made["B"], -127, 128)
    if name == "w4a8_matmul":
        made["scales"] = (made["scales"].abs() * 0.02 + 0.01).to(made["scales"].dtype)
        made["a_scales"] = made["a_scales"].abs() + 0.5
        if problem["dtype"] == "int8":
            made["A"] = torch.randint_like(made["A"], -127, 128)
    if name == "block_scaled_matmul":
        for each in ("a_scales", "b_scales"):
            made[each] = made[each].abs() + 0.5
    if name == "attention_backward":
        q, k, v = (made[each] for each in "QKV")
        made["O"], made["L"], *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, is_causal=problem["causal"]
        )
    if name.startswith("block_sparse_attention"):
        made["counts"], made["indices"] = listed(problem)
    if name == "block_sparse_attention_backward":
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        seen = seen_by(problem, made)
        made["query_counts"] = seen.sum(-2, dtype=torch.int32)
        made["query_indices"] = seen.mT.contiguous().argsort(dim=-1, descending=True, stable=True).int()
        mask, flex = block_mask(problem, made), torch.compile(flex_attention, dynamic=False)
        asked = {"block_mask": mask, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        out, aux = flex(*(made[each] for each in "QKV"), **asked)
        made["O"], made["L"] = out.contiguous(), aux.lse.contiguous()
    if name in ("chunk_state", "chunk_scan"):
        heads = problem["heads"]
        made["dt"] = torch.rand_like(made["dt"]) * 0.1
        rate = torch.rand(heads, 1, 1, device="cuda") * 8
        made["dA"] = -(made["dt"] * rate).cumsum(-1)
    if name == "chunk_scan":
        c = chunked(problem, made["C"])
        made["CB"] = torch.einsum("zcmgs,zckgs->zcgmk", c, torch.randn_like(c)).contiguous()


def listed(problem: Mapping[str, Any]) -> tuple[Any, Any]:
    """Lists of random blocks; causal ones have the one that the diagonal cuts, and none behind it."""
    import torch

    block, width = problem["key_block"], problem["width"]
    rows = problem["queries"] // block
    likely = torch.rand(problem["mask_batch"], problem["mask_heads"], rows, rows, device="cuda")
    if problem["causal"]:
        likely = likely.tril(-1) + 2 * torch.eye(rows, device="cuda")
    counts = (likely > 0).sum(-1, dtype=torch.int32).clamp(max=width)
    chosen = likely.topk(width).indices
    behind = torch.arange(width, device="cuda") >= counts[..., None]
    indices = chosen.masked_fill(behind, rows).sort(dim=-1).values  # what stands behind is no block
    return counts, indices.int()


def seen_by(problem: Mapping[str, Any], t: Mapping[str, Any]) -> Any:
    """Which blocks of keys each row of blocks sees."""
    import torch

    rows = problem["keys"] // problem["key_block"]
    lead = t["counts"].shape
    seen = torch.zeros(*lead, rows + 1, dtype=torch.bool, device="cuda")
    return seen.scatter(-1, t["indices"].long(), True)[..., :rows]


def block_mask(problem: Mapping[str, Any], t: Mapping[str, Any]) -> Any:
    """The same lists as FlexAttention has them: blocks that the diagonal cuts apart from whole ones."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    counts, causal = t["counts"], problem["causal"]
    lead, rows = counts.shape[:2], counts.shape[2]
    whole = torch.zeros(*lead, rows, rows, dtype=torch.int32, device="cuda")
    whole[..., : problem["width"]] = t["indices"].clamp(max=rows - 1)
    cut = torch.zeros_like(whole)
    cut[..., 0] = torch.arange(rows, device="cuda")  # the last of each list
    mask = (lambda b, h, q, k: q >= k) if causal else None
    once = torch.full_like(counts, int(causal))
    return BlockMask.from_kv_blocks(
        once,
        cut,
        counts - once,
        whole,
        BLOCK_SIZE=problem["key_block"],
        mask_mod=mask,
        compute_q_blocks="query_width" in problem,
    )


def scores_of(problem: Mapping[str, Any], t: Mapping[str, Any], h: int, q: Any, k: Any) -> Any:
    """The scores of a head of the last sequence, -inf where its lists have no block."""
    seen = seen_by(problem, t)[-1, h].repeat_interleave(problem["query_block"], 0)
    seen = seen.repeat_interleave(problem["key_block"], 1)
    seen = seen.tril() if problem["causal"] else seen
    return (q @ k.T / math.sqrt(problem["dim"])).masked_fill(~seen, -math.inf)


def chunked(problem: Mapping[str, Any], tensor: Any) -> Any:
    """(batch, length, ...) as (batch, chunks, chunk, ...)."""
    return tensor.reshape(problem["batch"], -1, problem["chunk"], *tensor.shape[2:])


def compared(name: str, problem: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[Any, Any]:
    """What a kernel computed and what it should be, of a part where all is too much."""
    import torch

    if name in ("w4a16_matmul", "w8a16_matmul"):
        return made["C"], made["A"].float() @ decoded(made, torch.float32).T
    if name == "w4a8_matmul":
        weights = decoded(made, torch.float32)
        return made["C"], made["A"].float() * made["a_scales"].unsqueeze(1) @ weights.T
    if name == "block_scaled_matmul":
        a = made["A"].float() * made["a_scales"].T.repeat_interleave(BLOCK, 1)
        b = made["B"].float() * made["b_scales"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return made["C"], a @ b.T
    if name == "mla_decode":
        last = {key: made[key][-1:].double() for key in ("Q", "KV")}
        return made["O"][-1:], attended(problem, last)
    if name == "block_sparse_attention":
        group, pairs = problem["heads"] // problem["kv_heads"], []
        for h in (0, problem["heads"] - 1):
            q, k, v = (made[each][-1, h if each == "Q" else h // group].double() for each in "QKV")
            pairs.append((made["O"][-1, h], scores_of(problem, made, h, q, k).softmax(-1) @ v))
        return torch.cat([got for got, _ in pairs]), torch.cat([expected for _, expected in pairs])
    if name == "block_sparse_attention_backward":
        return gradients(problem, made, lambda h, q, k: scores_of(problem, made, h, q, k))
    if name == "attention_backward":
        masked = torch.ones(problem["queries"], problem["keys"], dtype=torch.bool, device="cuda").triu(1)

        def scores(h: int, q: Any, k: Any) -> Any:
            whole = q @ k.T / math.sqrt(problem["dim"])
            return whole.masked_fill(masked, -math.inf) if problem["causal"] else whole

        return gradients(problem, made, scores)
    last = {key: value[-1:] if key != "D" else value for key, value in made.items()}
    own = {**problem, "batch": 1}
    if name == "chunk_state":
        return last["states"], states_of(own, {key: value.float() for key, value in last.items()})
    return last["Y"], scanned(own, {key: value.float() for key, value in last.items()})


def gradients(problem: Mapping[str, Any], made: Mapping[str, Any], scores: Callable[[int, Any, Any], Any]) -> Any:
    """Those of the last keys, their values and all queries that see them, and what they are in float64.

    `scores` says what a head's queries, by its number, give for keys.
    """
    import torch

    heads = range(problem["heads"] - problem["heads"] // problem["kv_heads"], problem["heads"])
    k, v = (made[each][-1, -1].double().requires_grad_() for each in "KV")
    queries = [made["Q"][-1, h].double().requires_grad_() for h in heads]
    for h, q in zip(heads, queries):
        (scores(h, q, k).softmax(-1) @ v).backward(made["dO"][-1, h].double())
    parts = [*(made["dQ"][-1, h] for h in heads), made["dK"][-1, -1], made["dV"][-1, -1]]
    return torch.cat([part.flatten() for part in parts]), torch.cat([t.grad.flatten() for t in (*queries, k, v)])


def decoded(made: Mapping[str, Any], dtype: Any = None) -> Any:
    """The weights that four bits, or eight, stand for, of a type: their scales', or bfloat16 where these are exponents.

    Codes whose scales are exponents are floats.
    """
    import torch

    floats = made["scales"].dtype == torch.uint8
    dtype = dtype or (torch.bfloat16 if floats else made["scales"].dtype)
    scales, numbers = (torch.exp2(made["scales"].float() - 127) if floats else made["scales"]).to(dtype), made["B"]
    if numbers.dtype == torch.uint8:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)
        if floats:
            numbers = torch.tensor([*FLOATS, *(-x for x in FLOATS)], device=numbers.device)[numbers.int()]
    group, numbers = numbers.shape[1] // scales.shape[0], numbers.to(dtype)
    if "points" in made:
        numbers = numbers - made["points"].to(dtype).T.repeat_interleave(group, dim=1)
    elif made["B"].dtype == torch.uint8 and not floats:
        numbers = numbers - 8
    return numbers * scales.T.repeat_interleave(group, dim=1)


def attended(problem: Mapping[str, Any], t: Mapping[str, Any]) -> Any:
    """Attention over latent vectors by PyTorch's operators, of sequences that are all as long as there is room for."""
    import torch

    scores = torch.matmul(t["Q"], t["KV"].transpose(1, 2)) / math.sqrt(problem["dim"] + problem["rope"])
    return torch.matmul(scores.softmax(-1), t["KV"][..., : problem["dim"]])


def states_of(problem: Mapping[str, Any], t: Mapping[str, Any]) -> Any:
    """States of chunks by PyTorch's operators."""
    import torch

    weights = ((t["dA"][..., -1:] - t["dA"]).exp() * t["dt"]).to(t["X"].dtype)
    x, b = chunked(problem, t["X"]), chunked(problem, t["B"])
    weighted = x.permute(0, 1, 3, 4, 2) * weights.permute(0, 2, 1, 3).unsqueeze(3)
    return torch.matmul(weighted, b.permute(0, 1, 3, 2, 4))  # one group, which all heads share


def scanned(problem: Mapping[str, Any], t: Mapping[str, Any]) -> Any:
    """The scan of chunks by PyTorch's operators."""
    import torch

    decay = (t["dA"].unsqueeze(-1) - t["dA"].unsqueeze(-2)).tril().exp().tril() * t["dt"].unsqueeze(-2)
    weights = decay.permute(0, 2, 1, 3, 4).to(t["X"].dtype) * t["CB"]
    x, c = chunked(problem, t["X"]).permute(0, 1, 3, 2, 4), chunked(problem, t["C"]).permute(0, 1, 3, 2, 4)
    before = torch.matmul(c, t["states"].transpose(-1, -2))
    y = torch.matmul(weights, x) + before * t["dA"].exp().permute(0, 2, 1, 3).unsqueeze(-1).to(x.dtype)
    y = y + x * t["D"].to(x.dtype)[:, None, None]
    return y.permute(0, 1, 3, 2, 4).reshape(t["X"].shape)


def peers(problem: Mapping[str, Any], name: str) -> dict[str, Callable[[Mapping[str, Any]], object]]:
    """PyTorch's functions of the same tensors, by the name of the peer."""
    import torch
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import flex_attention

    kept: dict[int, Any] = {}  # what is made at the first call, which is not timed
    compiled_flex = torch.compile(flex_attention, dynamic=False)  # compiled then, too

    def int4pack(t: Mapping[str, Any]) -> object:
        if id(t) not in kept:
            swapped = (t["B"] & 15) << 4 | t["B"] >> 4
            own = t["scales"].repeat_interleave(t["A"].shape[1] // GROUP // len(t["scales"]), dim=0)  # of a channel
            points = t["points"].to(own.dtype) if "points" in t else 8
            scales = torch.stack([own, (8 - points) * own], dim=-1)
            packed = torch.ops.aten._convert_weight_to_int4pack(swapped, 8)
            kept[id(t)] = t["A"].bfloat16(), packed, scales.contiguous()
        a, packed, scales = kept[id(t)]
        return torch.ops.aten._weight_int4pack_mm(a, packed, GROUP, scales)

    def in_eight_bits(t: Mapping[str, Any]) -> Any:
        """The codes in the type of A, 8 bits each, (k, n)."""
        if id(t) not in kept:
            kept[id(t)] = decoded({"B": t["B"], "scales": torch.ones_like(t["scales"])}).to(t["A"].dtype).T
        return kept[id(t)]

    def int_mm(t: Mapping[str, Any]) -> object:
        return torch._int_mm(t["A"], in_eight_bits(t))  # without any scale, which would be kernels of their own

    def scaled_mm_of_channels(t: Mapping[str, Any]) -> object:
        scales = t["a_scales"].unsqueeze(1), t["scales"][:1].float()
        return torch._scaled_mm(t["A"], in_eight_bits(t), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    def matmul_of_decoded(t: Mapping[str, Any]) -> object:
        if id(t) not in kept:
            kept[id(t)] = decoded(t).to(t["A"].dtype)
        return torch.matmul(t["A"], kept[id(t)].T, out=t["C"])

    def told(t: Mapping[str, Any]) -> Any:
        return torch.matmul(t["A"], decoded(t).to(t["A"].dtype).T)

    compiled_told = torch.compile(told, dynamic=False)

    def scaled_mm_of_blocks(t: Mapping[str, Any]) -> object:
        scales = t["a_scales"].T, t["b_scales"].T
        return torch._scaled_mm(t["A"], t["B"].T, *scales, out_dtype=torch.bfloat16)

    def cudnn_backward(t: Mapping[str, Any]) -> object:
        q, k, v = (t[each] for each in "QKV")
        if id(t) not in kept:
            kept[id(t)] = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, is_causal=problem["causal"]
            )
        o, l, cum_q, cum_k, max_q, max_k, seed, offset, _ = kept[id(t)]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            t["dO"], q, k, v, o, l, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, problem["causal"]
        )

    def flex(t: Mapping[str, Any]) -> object:
        if id(t) not in kept:
            kept[id(t)] = block_mask(problem, t)
        return compiled_flex(t["Q"], t["K"], t["V"], block_mask=kept[id(t)], enable_gqa=True)

    def flex_backward(t: Mapping[str, Any]) -> object:
        if id(t) not in kept:
            functorch.donated_buffer = False  # what the forward pass made is read in each call
            graph = torch.cuda.graph
            if graph.default_capture_stream is None:
                graph.default_capture_stream = torch.cuda.Stream()
            leaves = [t[each].detach().requires_grad_() for each in "QKV"]
            # Gradients are computed on the stream of the forward pass, and graphs are captured on this one.
            graph.default_capture_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(graph.default_capture_stream):
                kept[id(t)] = leaves, compiled_flex(*leaves, block_mask=block_mask(problem, t), enable_gqa=True)
            torch.cuda.synchronize()
        leaves, out = kept[id(t)]
        return torch.autograd.grad(out, leaves, t["dO"], retain_graph=True)

    function = {"chunk_state": states_of, "chunk_scan": scanned, "mla_decode": attended}.get(name)
    return {
        "int4pack": int4pack,
        "decoded": matmul_of_decoded,
        "compiled": compiled_told,
        "int_mm": int_mm,
        "scaled_mm of channels": scaled_mm_of_channels,
        "scaled_mm of blocks": scaled_mm_of_blocks,
        "cudnn backward": cudnn_backward,
        "flex": flex,
        "flex backward": flex_backward,
        **({"torch": lambda t: function(problem, t)} if function is not None else {}),
    }
