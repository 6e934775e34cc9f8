"""What the tests of `tailavg.torch` share: slow references, odd models and their averages."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Growing, RawTail
from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.cases import rules, short
from tests.support.model import Blocks, alphas

torch.set_num_threads(1)  # tensors are tiny and tests run side by side

TORCH_RULES = [
    AnytimeWindow(1),
    AnytimeWindow(40, 2),
    AnytimeWindow(900, 4),
    AnytimeWindow(0.1, 5),
    AnytimeWindow(1.0),
    AnytimeWindow(Growing(0.5, at_most=300), 4),
    AnytimeWindow(10, 4, turns="paper"),
    AnytimeWindow(0.25, 5, turns="paper"),
    Exponential(1),
    Exponential(1000),
    Exponential(0.25),
    Exponential(Growing(0.5, at_most=300)),
    RawTail(0.5, total=1000),
    RawTail(100, total=300),
]
every_rule = pytest.mark.parametrize("rule", TORCH_RULES, ids=short)
kept_rules = rules.filter(lambda rule: not isinstance(rule, ExactWindow))


def dense(rule, steps) -> dict[int, np.ndarray]:
    """The weights of all updates so far, at each of these steps."""
    steps = set(steps)
    if not steps:
        return {}
    if isinstance(rule, AnytimeWindow):
        blocks, rows = Blocks(rule), {}
        for t in range(1, max(steps) + 1):
            blocks.add()
            if t in steps:
                rows[t] = blocks.alpha()
        return rows
    every = zip(range(1, max(steps) + 1), alphas(rule), strict=False)
    return {t: alpha for t, alpha in every if t in steps}


def wide(tensor: torch.Tensor) -> np.ndarray:
    """The values in double precision, whatever the layout."""
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to(kind).cpu().numpy().copy()


def named(model) -> dict[str, torch.Tensor]:
    """Every parameter under every name that it has."""
    return dict(model.named_parameters(remove_duplicate=False))


class History:
    """A double precision copy of every parameter at every update: the slow reference."""

    def __init__(self, model=None):
        self.samples: dict[str, list[np.ndarray]] = {}
        self.model = model

    def record(self, tensors=None) -> None:
        for name, tensor in (named(self.model) if tensors is None else tensors).items():
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                self.samples.setdefault(name, []).append(wide(tensor))

    def average(self, rule) -> dict[str, np.ndarray]:
        count = len(next(iter(self.samples.values())))
        alpha = dense(rule, [count])[count]
        return {name: np.tensordot(alpha, np.array(xs), 1) for name, xs in self.samples.items()}


def tolerance(dtype: torch.dtype) -> float:
    """Relative, for averages of values of about 1 that are handed out in this type."""
    if dtype in (torch.float64, torch.complex128):
        return 1e-12
    if dtype in (torch.float32, torch.complex64):
        return 4e-6
    return 0.51 * torch.finfo(dtype).eps + 4e-6  # rounded once, to the nearest


def assert_averages(got, expected, dtype=None) -> None:
    """That a state dict has these averages, as well as its types can hold them."""
    assert expected.keys() <= got.keys()
    for name, values in expected.items():
        kind = got[name].dtype if dtype is None else dtype
        np.testing.assert_allclose(
            wide(got[name]), values, rtol=tolerance(kind), atol=2e-6, err_msg=name
        )


def bits(tensors) -> dict[str, bytes]:
    """The bytes of named tensors, or of all of a model's: NaN and the sign of 0 count."""
    if isinstance(tensors, nn.Module):
        buffers = tensors.named_buffers(remove_duplicate=False)
        tensors = named(tensors) | dict(buffers)
    return {name: (str(t.dtype).encode() + raw(t)) for name, t in tensors.items()}


def raw(tensor) -> bytes:
    flat = tensor.detach().cpu().reshape(-1)
    flat = flat.clone(memory_format=torch.contiguous_format)  # NumPy pins the memory it is shown
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def snapshot(value):
    """A state with its tensors as bytes, to be compared with ==; blocks not in use do not count."""
    if isinstance(value, dict) and "starts" in value and "blocks" in value:
        of_blocks = [key for key in ("blocks", "variances") if key in value]
        value = value | {key: value[key][: len(value["starts"])] for key in of_blocks}
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype), raw(value)
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    return value


def comparable(average):
    """A state to compare; the mean of a block in which nothing is folded does not count."""
    found = average.state_dict()
    if found["starts"] and found["folded"] == found["starts"][-1]:
        found = found | {"blocks": [*found["blocks"][: len(found["starts"]) - 1], None]}
    return snapshot(found)


class Walk:
    """Random weights, one draw per step, written into a model as an optimizer writes them."""

    def __init__(self, model, seed: int = 0):
        self.model = model
        self.random = torch.Generator().manual_seed(seed)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not (parameter.is_floating_point() or parameter.is_complex()):
                    continue
                kind = torch.float64 if parameter.dtype.itemsize == 8 else torch.float32
                noise = torch.rand(parameter.shape, generator=self.random, dtype=kind)
                parameter.copy_(1 + noise)


def walked(model, rule, steps: int, seed: int = 0, **options):
    """An average after so many updates, and the model's walk and history."""
    average = ParameterAverage(model, rule, **options)
    walk, history = Walk(model, seed), History(model)
    for _ in range(steps):
        walk.step()
        average.update()
        history.record()
    return average, walk, history


def walked_module(model, rule, steps: int, **options):
    """Return an averaged model after so many updates, and the walk and history of its source."""
    averaged = AveragedModel(model, rule, **options)
    walk, history = Walk(model), History(model)
    for _ in range(steps):
        walk.step()
        averaged.update_parameters(model)
        history.record()
    return averaged, walk, history


def counted(rule=None, steps: int = 100, **options):
    """Return a weight that was 0, 1, 2, …, and its average."""
    weight = torch.zeros(2)
    average = ParameterAverage({"w": weight}, rule or AnyTail(8), **options)
    for step in range(steps):
        weight.fill_(step)
        average.update()
    return weight, average


def outputs(average, folder):
    """Return every call that reads an average with a window."""
    return {
        "average_parameters": lambda window: average.average_parameters(window).__enter__(),
        "copy_to": lambda window: average.copy_to(window=window),
        "copy_to another": lambda window: average.copy_to({"w": torch.zeros(2)}, window),
        "averaged_state_dict": lambda window: average.averaged_state_dict(window=window),
        "full_state_dict": lambda window: average.full_state_dict(window=window),
        "save_averaged": lambda window: average.save_averaged(folder / "file", window=window),
        "weights": lambda window: average.weights(window),
        "profile": lambda window: average.profile(window),
        "select_tail": lambda window: average.select_tail(lambda: 1.0, [1.0, window]),
    }


def only_tensors(state) -> dict[str, torch.Tensor]:
    """Return a state without what is no tensor."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def saved(state):
    """A state through a file, with nothing unpickled but tensors and plain data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors_of(width: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each floating type."""
    torch.manual_seed(seed)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    return {str(kind)[6:]: torch.rand(width, dtype=kind) for kind in kinds}


class Odd(nn.Module):
    """A model with everything at once that real models have one by one."""

    def __init__(self, seed: int = 0, compiled: bool = True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.module = nn.Linear(8, 8)  # the user's own name, not a wrapper
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.low = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
        self.precise = nn.Linear(8, 8).double()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.columns = nn.Parameter(torch.rand(4, 8).t())
        self.slice = nn.Parameter(torch.rand(3, 6)[1:, ::2])
        self.spin = nn.Parameter(torch.rand(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.codes = nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False)
        self.register_parameter("absent", None)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.rand(4), persistent=False)
        self.register_buffer("nothing", None)
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.fast = torch.compile(inner, backend="eager") if compiled else inner
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens, images):
        self.steps += 1
        x = self.module(self.embed(tokens)) + self.frozen(self.embed(tokens))
        x = self.low(x.to(torch.bfloat16)).float() + self.precise(x.double()).float()
        pooled = self.norm(self.conv(images)).mean((2, 3)) + self.cache
        x = self.fast(x) * self.scale + pooled @ self.columns.t()
        return self.head(x) + self.slice.sum() + self.spin.abs().sum()

    def loss(self, seed: int) -> torch.Tensor:
        return self(*odd_batch(seed)).square().mean()


def odd_batch(seed: int):
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (5,), generator=random)
    return tokens, torch.rand(5, 2, 4, 4, generator=random)


def small(seed: int = 0, norm: bool = True) -> nn.Sequential:
    """A network of a few weights, with BatchNorm's buffers in it."""
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(4)] if norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2))


def batches(model, steps: int, seed: int = 0):
    """Forward passes that move BatchNorm's statistics."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.rand(6, 3, generator=random))
        yield


class FailAt(TorchDispatchMode):
    """Raises in the place of the n-th operation on tensors."""

    def __init__(self, n: int, error: type[BaseException]):
        super().__init__()
        self.left, self.error = n, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise self.error("stopped here")
        return func(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """The bytes of the largest new tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {id_of(t) for t in flat_tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in flat_tensors(result):
            if id_of(tensor) not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def id_of(tensor) -> int:
    return tensor.untyped_storage()._cdata


def flat_tensors(value):
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
