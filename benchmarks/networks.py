"""The names and shapes of the parameters of networks, and the processor of this machine."""

import math
import platform
from itertools import product
from pathlib import Path

Shapes = dict[str, tuple[int, ...]]


def resnet50() -> Shapes:
    """torchvision's resnet50."""
    found: Shapes = {}

    def convolution(name: str, norm: str, out: int, *rest: int) -> None:
        found[f"{name}.weight"] = (out, *rest)
        found.update({f"{norm}.weight": (out,), f"{norm}.bias": (out,)})

    convolution("conv1", "bn1", 64, 3, 7, 7)
    channels = 64
    for layer, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(blocks):
            at = f"layer{layer}.{block}"
            convolution(f"{at}.conv1", f"{at}.bn1", width, channels, 1, 1)
            convolution(f"{at}.conv2", f"{at}.bn2", width, width, 3, 3)
            convolution(f"{at}.conv3", f"{at}.bn3", 4 * width, width, 1, 1)
            if block == 0:
                down = f"{at}.downsample"
                convolution(f"{down}.0", f"{down}.1", 4 * width, channels, 1, 1)
            channels = 4 * width
    return found | {"fc.weight": (1000, channels), "fc.bias": (1000,)}


def gpt2() -> Shapes:
    """GPT-2 small, with its output tied to wte."""
    d = 768
    found: Shapes = {"wte.weight": (50257, d), "wpe.weight": (1024, d)}
    layers = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d)}
    layers |= {"mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}
    for block in range(12):
        for norm in ("ln_1", "ln_2"):
            found.update({f"h.{block}.{norm}.{part}": (d,) for part in ("weight", "bias")})
        for name, (inputs, outputs) in layers.items():
            found[f"h.{block}.{name}.weight"] = (inputs, outputs)
            found[f"h.{block}.{name}.bias"] = (outputs,)
    return found | {"ln_f.weight": (d,), "ln_f.bias": (d,)}


def many_small() -> Shapes:
    """1,000 layers, each with a weight and a bias of 256 numbers."""
    return {f"layers.{i}.{part}": (256,) for i, part in product(range(1000), ("weight", "bias"))}


SETS = {"ResNet-50": resnet50(), "GPT-2 small": gpt2(), "2,000 × 256": many_small()}


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def processor() -> str:
    found = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(found)} × {found[0]}" if found else platform.processor()
