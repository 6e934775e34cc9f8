"""Which tensors of a model are averaged, by name, and a cheap check that they are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

__all__ = [
    "Buffers",
    "Choice",
    "Source",
    "Tracking",
    "is_sharded",
    "local",
    "outside_autograd",
    "sharded_like",
    "unwrap",
]

Buffers = Literal["copy", "average", "skip"]
Choice = str | Sequence[str] | Callable[[str], bool] | None
Source = Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

Call = TypeVar("Call", bound=Callable[..., Any])

_PLACE = (Tensor.data_ptr, Tensor.stride, attrgetter("nbytes"))  # where a tensor's elements are


def outside_autograd(call: Call) -> Call:
    """Run without gradients; tensors made inside also work outside `torch.inference_mode`."""
    return torch.inference_mode(False)(torch.no_grad()(call))


def unwrap(model: Module) -> Module:
    """The module inside DDP, DataParallel and torch.compile wrappers."""
    compiled = _imported("torch._dynamo", "OptimizedModule")
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(model, compiled):
            inside: Any = model
            model = inside._orig_mod
        else:
            return model


def _imported(module: str, name: str) -> Any:
    """A class for isinstance; () if its module is not imported, since then it has no instances."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    return isinstance(tensor, _imported("torch.distributed.tensor", "DTensor"))


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; any other tensor unchanged."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharded_like(shard: Tensor, like: Tensor) -> Tensor:
    """The DTensor that a shard belongs to, if `like` is a DTensor; otherwise the shard."""
    if not is_sharded(like):
        return shard
    whole: Any = like
    made: Tensor = type(whole).from_local(
        shard,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return made


def _walk(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """Every module with its prefix, unwrapped; shared modules appear once for each name."""
    module = unwrap(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


class _Patterns:
    """Names chosen by glob patterns or a function. Every pattern must match at least one name."""

    def __init__(self, option: str, choice: Choice) -> None:
        self.option = option
        self.choice = choice
        if isinstance(choice, str):
            self.choice = [choice]
        elif choice is not None and not callable(choice):
            self.choice = list(choice)
            if not all(isinstance(pattern, str) for pattern in self.choice):
                raise TypeError(f"{option}: expected patterns or a function, got {choice!r}")

    def among(self, names: Sequence[str]) -> set[str]:
        if self.choice is None:
            return set()
        if callable(self.choice):
            return {name for name in names if self.choice(name)}
        chosen = set()
        for pattern in self.choice:
            matches = {name for name in names if fnmatchcase(name, pattern)}
            if not matches:
                raise ValueError(
                    f"{self.option}: expected patterns that match names such as {names[0]!r}, "
                    f"got {pattern!r}, which matches none"
                )
            chosen |= matches
        return chosen


class Tracking:
    """The tensors of a model by name: `averaged`, other `parameters` and other `buffers`.

    A tensor with several names is listed under the first; `aliases` maps every name to that one.
    Expanded tensors, which cannot be written to, appear only in `aliases`.
    """

    def __init__(
        self,
        source: Source,
        *,
        include: Choice = None,
        exclude: Choice = None,
        buffers: Buffers = "copy",
    ) -> None:
        if buffers not in get_args(Buffers):
            raise ValueError(f"buffers: expected one of {get_args(Buffers)}, got {buffers!r}")
        self._average_buffers = buffers == "average"
        self.module: Module | None = None
        if isinstance(source, Module):
            self.module = unwrap(source)
        else:
            pairs = list(source.items() if isinstance(source, Mapping) else source)
            self._given = dict(pairs)
            for name, tensor in pairs:
                if not (isinstance(name, str) and isinstance(tensor, Tensor)):
                    raise TypeError(
                        "expected a module or pairs of a name and a tensor, as named_parameters() "
                        f"gives, got a pair of {type(name).__name__} and {type(tensor).__name__}"
                    )
                if self._given[name] is not tensor:
                    raise ValueError(f"{name}: expected each name once, got two tensors with it")
        self._include = _Patterns("include", include)
        self._exclude = _Patterns("exclude", exclude)
        self._fsdp: list[Any] = []
        self._adopt(self._look())
        self.shapes = {name: _shapes(tensor) for name, tensor in self.averaged.items()}
        if not self.averaged:
            raise ValueError(
                "expected at least one floating point tensor to average, got none; "
                "include and exclude choose them by name"
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Every tensor under each of its names, and whether it is a buffer."""
        if self.module is None:
            yield from ((name, tensor, False) for name, tensor in self._given.items())
            return
        for prefix, module in _walk(self.module):
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    yield prefix + name, tensor, False
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield prefix + name, buffer, True

    def _look(self) -> _Seen:
        """The tensors the model has now."""
        self.reshard()
        first: dict[int, str] = {}
        found: dict[str, tuple[Tensor, bool]] = {}
        seen = _Seen({}, {}, {}, {})
        for name, tensor, is_buffer in self._tensors():
            if is_lazy(tensor):
                raise ValueError(
                    f"{name}: expected a tensor with a shape, got an uninitialised one; "
                    "run a batch through the model first"
                )
            seen.aliases[name] = first.setdefault(id(tensor), name)
            found.setdefault(seen.aliases[name], (tensor, is_buffer))
        names = list(seen.aliases)
        chosen = self._include.among(names) if self._include.choice is not None else set(names)
        chosen -= self._exclude.among(names)
        chosen = {seen.aliases[name] for name in chosen}
        for name, (tensor, is_buffer) in found.items():
            numbers = tensor.is_floating_point() or tensor.is_complex()
            expanded = any(
                size > 1 and step == 0
                for size, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            if name in chosen and numbers and (self._average_buffers or not is_buffer):
                if expanded:
                    raise ValueError(
                        f"{name}: expected a tensor with its own memory for each element, got an "
                        "expanded one; exclude it, or call contiguous() on it"
                    )
                seen.averaged[name] = tensor
            elif not expanded:  # expanded tensors are never written to
                (seen.buffers if is_buffer else seen.parameters)[name] = tensor
        return seen

    def _adopt(self, seen: _Seen) -> None:
        self.averaged, self.parameters, self.buffers, self.aliases = seen
        self.locals = {name: local(tensor) for name, tensor in self.averaged.items()}
        self._sharded = [tensor for tensor in self.averaged.values() if is_sharded(tensor)]
        self._shards = [local(tensor) for tensor in self._sharded]
        self._tensors_seen = list(self.locals.values())
        self._places = [list(map(part, self._tensors_seen)) for part in _PLACE]
        self._slots: list[dict[str, Any]] = []
        self._fsdp = []
        if self.module is not None:
            fsdp = _imported("torch.distributed.fsdp", "FSDPModule")
            for module in {id(module): module for _, module in _walk(self.module)}.values():
                self._slots += [module._parameters, module._buffers, module._modules]
                if isinstance(module, fsdp):
                    self._fsdp.append(module)
        # kept alive, so that ids stay unique
        self._members = list(chain.from_iterable(map(dict.values, self._slots)))
        self._ids = list(map(id, self._members))

    def is_current(self) -> bool:
        """Whether the model still has the same tensors at the same places in memory.

        This compares every tensor, at about 250 ns each. It notices `layer.weight = …`, a new
        submodule, `load_state_dict(assign=True)`, `parameter.data = …` and `model.to(…)`.
        """
        self.reshard()
        return (
            all(list(map(part, self._tensors_seen)) == was for part, was in self._placed())
            and list(map(id, chain.from_iterable(map(dict.values, self._slots)))) == self._ids
            and all(map(_same_shard, self._sharded, self._shards))
        )

    def _placed(self) -> Iterator[tuple[Callable[[Tensor], Any], list[Any]]]:
        return zip(_PLACE, self._places, strict=True)

    def refresh(self) -> bool:
        """Look again if the model changed; True if it did.

        Raises:
            ValueError: If names or shapes differ; nothing changes.
        """
        if self.is_current():
            return False
        seen = self._look()
        check_names("model", self.shapes, seen.averaged)
        self._adopt(seen)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict, with its own tensors."""
        if self.module is None:
            return dict(self._given)
        state: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return state

    def slots(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The dicts in which modules hold parameters and buffers, each with a copy."""
        of_tensors = [slots for i, slots in enumerate(self._slots) if i % 3 < 2]
        return [(slots, dict(slots)) for slots in of_tensors]

    def of(self, model: Source, options: Mapping[str, Any]) -> Tracking:
        """Another model's tensors under the names of this one.

        If this one was made from names and tensors, only those names count.

        Raises:
            ValueError: If names or shapes differ.
        """
        other = Tracking(model, **options)
        for attribute in ("averaged", "parameters", "buffers"):
            mine, its = getattr(self, attribute), getattr(other, attribute)
            found: dict[str, Tensor] = {}
            for alias, name in other.aliases.items():
                if name in its and (self.module is not None or alias in self.aliases):
                    tied = self.aliases.get(alias, alias)
                    if found.setdefault(tied, its[name]) is not its[name]:
                        raise ValueError(
                            f"model: {alias}: expected the same tensor as {tied}, as in the "
                            "averaged model, got another one"
                        )
            check_names("model", {name: _shapes(tensor) for name, tensor in mine.items()}, found)
            setattr(other, attribute, found)
        other.locals = {name: local(tensor) for name, tensor in other.averaged.items()}
        return other

    def reshard(self) -> None:
        """Let FSDP drop the weights that a forward pass gathered, and go back to the shards."""
        for module in self._fsdp:
            module.reshard()


class _Seen(NamedTuple):
    averaged: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]


def _shapes(tensor: Tensor) -> tuple[torch.Size, torch.Size]:
    """The shape of a tensor, and that of this process's shard."""
    return tensor.shape, local(tensor).shape


def check_names(
    what: str, expected: Mapping[str, tuple[torch.Size, torch.Size]], got: Mapping[str, Tensor]
) -> None:
    """Raise a ValueError that names the missing, unexpected or misshapen tensors."""
    if missing := [name for name in expected if name not in got]:
        raise ValueError(f"{what}: expected {_listed(missing)}, got none of that name")
    if unexpected := [name for name in got if name not in expected]:
        raise ValueError(
            f"{what}: expected only the original names, got {_listed(unexpected)} as well"
        )
    for name, shapes in expected.items():
        if not isinstance(got[name], Tensor):
            raise ValueError(f"{what}: {name}: expected a tensor, got {type(got[name]).__name__}")
        for shape, its in zip(shapes, _shapes(got[name]), strict=True):
            if shape != its:
                raise ValueError(
                    f"{what}: {name}: expected shape {tuple(shape)}, got {tuple(its)}; "
                    "averaged tensors must keep their shapes"
                )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _same_shard(tensor: Any, shard: Tensor) -> bool:
    return tensor._local_tensor is shard
