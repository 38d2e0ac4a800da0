"""What scripts/bench_gpu.py measures of convolutions: layers of networks for images, in bf16, beside cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

BATCH = 32

LAYERS = {
    "resnet 3x3 of 64": (56, 64, 64, 3, 1),
    "resnet 3x3 of 128": (28, 128, 128, 3, 1),
    "resnet 3x3 of 256": (14, 256, 256, 3, 1),
    "resnet 3x3 of 512": (7, 512, 512, 3, 1),
    "resnet 1x1 of 64 to 256": (56, 64, 256, 1, 1),
    "resnet 1x1 of 1024 to 256": (14, 1024, 256, 1, 1),
    "resnet 1x1 of 512 to 2048": (7, 512, 2048, 1, 1),
    "vgg 3x3 of 256": (56, 256, 256, 3, 1),
    "vgg 3x3 of 512": (14, 512, 512, 3, 1),
    "resnext 3x3 of 32x4": (56, 128, 128, 3, 32),
    "resnext 3x3 of 32x8": (28, 256, 256, 3, 32),
    "resnext 3x3 of 32x16": (14, 512, 512, 3, 32),
    "resnext 3x3 of 32x32": (7, 1024, 1024, 3, 32),
    "convnext 7x7 of 96": (56, 96, 96, 7, 96),
    "convnext 7x7 of 384": (14, 384, 384, 7, 384),
}
"""Pixels along a side, channels of images and of results, pixels along a side of the kernel, and groups.

Of ResNet-50 (He et al., 2016), VGG-16 (Simonyan and Zisserman, 2015), ResNeXt-50 of 32 x 4 channels (Xie et al., 2017)
and ConvNeXt-T (Liu et al., 2022).
"""


def cases() -> Iterator[tuple[str, dict[str, Any], float]]:
    """A name, the problem, and its floating-point operations."""
    for layer, (side, channels, out_channels, kernel, groups) in LAYERS.items():
        extents = {"batch": BATCH, "height": side, "width": side, "channels": channels, "out_channels": out_channels}
        problem = {**extents, "kernel_height": kernel, "kernel_width": kernel, "dtype": "bfloat16"}
        problem |= {"padding": (kernel // 2, kernel // 2), "groups": groups}
        yield f"conv2d {layer}", problem, 2.0 * BATCH * side**2 * out_channels * kernel**2 * channels / groups


def convolved(problem: Mapping[str, Any], x: Any, w: Any) -> Any:
    """PyTorch's convolution, of tensors whose channels lie last; so do the result's."""
    import torch

    windows = {name: problem.get(name, default) for name, default in (("padding", (0, 0)), ("dilation", (1, 1)))}
    stride, groups = problem.get("strides", (1, 1)), problem.get("groups", 1)
    # A view, which PyTorch knows as channels_last.
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), None, stride, **windows, groups=groups)
    return y.permute(0, 2, 3, 1)


def compared(problem: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[Any, Any]:
    """What the kernel computed of the last image, and what it should be."""
    return made["Y"][-1:], convolved(problem, made["X"][-1:].double(), made["W"].double())


def peers(problem: Mapping[str, Any]) -> dict[str, Callable[[Mapping[str, Any]], object]]:
    """PyTorch's function of the same tensors, by the name of the peer."""
    import torch

    torch.backends.cudnn.benchmark = True  # cuDNN then takes the fastest of its kernels, at the first call
    return {"cudnn conv2d": lambda t: convolved(problem, t["X"], t["W"])}
