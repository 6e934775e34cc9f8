"""Which tensors of a model are averaged, by name, and a cheap check that they are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

__all__ = [
    "Buffers",
    "Choice",
    "Source",
    "Tracking",
    "check_names",
    "is_frozen",
    "is_sharded",
    "local",
    "outside_autograd",
    "sharded_like",
    "unwrap",
]

Buffers = Literal["copy", "average", "skip"]
Choice = str | Sequence[str] | Callable[[str], bool] | None
Source = Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor]

Call = TypeVar("Call", bound=Callable[..., Any])
Signature = tuple[torch.Size, torch.Size, str]
"""The shape of a tensor, the shape of this process's shard, and the kind of its numbers."""

_TRAINS = attrgetter("requires_grad")
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


def is_frozen(tensor: Tensor) -> bool:
    """Whether this is a parameter that does not train. (Of a plain tensor nobody said so.)"""
    return not tensor.requires_grad and isinstance(tensor, Parameter)


def sharded_like(shard: Tensor, like: Tensor) -> Tensor:
    """The DTensor that a shard belongs to, if `like` is a DTensor; otherwise the shard."""
    if not is_sharded(like):
        return shard
    whole: Any = like
    made: Tensor = type(whole).from_local(
        _alone(shard),
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return made


def _alone(view: Tensor) -> Tensor:
    """The same memory as a storage of its own: a DTensor over a part of one cannot be saved."""
    start, size = view.storage_offset() * view.itemsize, view.numel() * view.itemsize
    if not start:
        return view
    storage: Any = view.untyped_storage()[start : start + size]
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())


def _walk(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """Every module with its prefix, unwrapped; shared modules appear once for each name."""
    module = unwrap(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"model: {prefix[:-1] or 'the model'}: expected a module of Python, got a "
            f"{type(module).__name__}, which holds its tensors elsewhere; average the model that "
            "it was made from, or pass its named_parameters() to ParameterAverage"
        )
    yield prefix, module
    hooked = module.state_dict(keep_vars=True) if module._state_dict_hooks else {}
    for name, child in module._modules.items():
        if child is not None:
            seen_through = hooked and _leaves_out(hooked, name, child)
            yield from _walk(child, prefix if seen_through else f"{prefix}{name}.")


def _leaves_out(state: Mapping[str, Any], name: str, child: Module) -> bool:
    """Whether a module's state dict has the tensors of a child without the name of the child.

    So it is in wrappers such as that of activation checkpointing, which remove it in a hook.
    """
    tensors = child.state_dict(keep_vars=True)
    return bool(tensors) and all(
        f"{name}.{key}" not in state and (state.get(key) is value or not isinstance(value, Tensor))
        for key, value in tensors.items()
    )


def _patterns(option: str, choice: Choice) -> list[str] | Callable[[str], bool] | None:
    """Return a function of a name, or glob patterns, as they are given for an option."""
    if choice is None or (callable(choice) and not isinstance(choice, str)):
        return choice
    patterns = [choice] if isinstance(choice, str) else list(choice)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{option}: expected patterns or a function, got {choice!r}")
    return patterns


def _chosen(option: str, choice: Choice, names: Sequence[str]) -> set[str]:
    """Return the names that a choice means. Every pattern must match at least one name."""
    if callable(choice):
        return {name for name in names if choice(name)}
    chosen = set()
    for pattern in choice or ():
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(
                f"{option}: {pattern!r} matches no name; the names are such as {names[0]!r}"
            )
        chosen |= matches
    return chosen


class Tracking:
    """The tensors of a model by name: `averaged`, other `parameters` and other `buffers`.

    A tensor with several names is listed under the first; `aliases` maps every name to that one.
    Tensors that are the same view of the same memory count as one; `twins` has the others of them.
    An averaged tensor that shares memory in any other way is refused. Expanded and sparse tensors,
    which cannot be written to, appear only in `aliases`.
    """

    def __init__(
        self,
        source: Source,
        *,
        include: Choice = None,
        exclude: Choice = None,
        buffers: Buffers = "copy",
        trainable_only: bool = False,
    ) -> None:
        if buffers not in get_args(Buffers):
            raise ValueError(f"buffers: expected one of {get_args(Buffers)}, got {buffers!r}")
        self._average_buffers = buffers == "average"
        self._trainable_only = trainable_only
        self.module: Module | None = None
        self.unnamed = False  # the names are numbers
        if isinstance(source, Module):
            self.module = unwrap(source)
        else:
            self._given, self.unnamed = _given(source)
        self._include = _patterns("include", include)
        self._exclude = _patterns("exclude", exclude)
        self._fsdp: list[Any] = []
        self.signatures: dict[str, Signature] = {}
        self.apart: list[tuple[str, str, Tensor]] = []  # see `of`
        self._adopt(self._look())
        self.settle()
        self.signatures = {name: _signature(tensor) for name, tensor in self.averaged.items()}

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
        first: dict[Any, str] = {}
        objects: dict[int, Tensor] = {}
        found: dict[str, tuple[Tensor, bool]] = {}
        trains: set[str] = set(self.signatures)  # what is averaged is averaged for good
        seen = _Seen({}, {}, {}, {}, [])
        for name, tensor, is_buffer in self._tensors():
            if is_lazy(tensor):
                raise ValueError(
                    f"{name}: expected a tensor with a shape, got an uninitialised one; "
                    "run a batch through the model first"
                )
            known = seen.aliases[name] = first.setdefault(_identity(tensor), name)
            if known != name and id(tensor) not in objects:
                seen.twins.append((known, tensor))
            objects[id(tensor)] = tensor
            if not (self._trainable_only and is_frozen(tensor)):
                trains.add(known)
            kept, was_buffer = found.get(known, (tensor, True))
            found[known] = kept, was_buffer and is_buffer
        names = list(seen.aliases)
        chosen = set(names) if self._include is None else _chosen("include", self._include, names)
        chosen -= _chosen("exclude", self._exclude, names)
        chosen = {seen.aliases[name] for name in chosen} & trains
        for name, (tensor, is_buffer) in found.items():
            numbers = tensor.is_floating_point() or tensor.is_complex()
            writable = local(tensor).layout is torch.strided and not _is_expanded(tensor)
            if name in chosen and numbers and (self._average_buffers or not is_buffer):
                _check_values(name, tensor)
                if not writable:
                    raise ValueError(
                        f"{name}: expected a tensor with its own memory for each element, got an "
                        "expanded one; exclude it, or call contiguous() on it"
                    )
                seen.averaged[name] = tensor
            elif writable:
                (seen.buffers if is_buffer else seen.parameters)[name] = tensor
        for one, other in _overlaps({name: tensor for name, (tensor, _) in found.items()}):
            if one in seen.averaged or other in seen.averaged:
                raise ValueError(
                    f"{one} and {other} share part of their memory, so they cannot be averaged; "
                    "clone() one of them, or exclude both"
                )
        return seen

    def _adopt(self, seen: _Seen) -> None:
        self._ids: list[int] | None = None  # not current until `settle`
        self.averaged, self.parameters, self.buffers, self.aliases, self.twins = seen
        self.locals = {name: local(tensor) for name, tensor in self.averaged.items()}
        watched = [*self.averaged.values(), *(t for name, t in self.twins if name in self.averaged)]
        self._sharded = [tensor for tensor in watched if is_sharded(tensor)]
        self._shards = [local(tensor) for tensor in self._sharded]
        self._tensors_seen = [local(tensor) for tensor in watched]
        self._places = [list(map(part, self._tensors_seen)) for part in _PLACE]
        left_out = self.parameters.values() if self._trainable_only else ()
        self._frozen = [tensor for tensor in left_out if is_frozen(tensor)]
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

    def settle(self) -> None:
        """Take what was found for current, from now on: all that follows from it is done."""
        self._ids = list(map(id, self._members))

    def __getstate__(self) -> dict[str, Any]:
        """The tensors of a copy are at other places, which are to be looked at."""
        return self.__dict__ | {"_ids": None}

    def is_current(self) -> bool:
        """Whether the model still has the same tensors at the same places in memory.

        This compares every tensor, at about 250 ns each. It notices `layer.weight = …`, a new
        submodule, `load_state_dict(assign=True)`, `parameter.data = …` and `model.to(…)`.
        """
        self.reshard()
        return (
            list(map(id, chain.from_iterable(map(dict.values, self._slots)))) == self._ids
            and [list(map(part, self._tensors_seen)) for part in _PLACE] == self._places
            and all(map(_same_shard, self._sharded, self._shards))
            and not any(map(_TRAINS, self._frozen))
        )

    def refresh(self, then: Callable[[Mapping[str, Tensor]], None] | None = None) -> None:
        """Look again if the model changed, and call `then` with the tensors to average.

        Raises:
            ValueError: If names, shapes or ties differ; nothing changes.
        """
        if self.is_current():
            return
        seen = self._look()
        for name, first in seen.aliases.items():
            was = self.aliases.get(name, first)
            if was != first and was in self.signatures:
                expected = "memory of its own" if was == name else f"the memory of {was}"
                got = "its own" if first == name else f"that of {first}"
                raise ValueError(
                    f"model: {name}: expected {expected}, as at first, got {got}; an average goes "
                    "on only while the same tensors are tied"
                )
        if thawed := [name for name in seen.averaged if name in self.parameters]:
            raise ValueError(
                f"model: {_listed(thawed)}: expected frozen parameters, as when the average was "
                "created, got ones that train; create the average with trainable_only=False if "
                "some are to be trained later, or create another one now"
            )
        check_names("model", self.signatures, seen.averaged)
        self._adopt(seen)
        if then is not None:
            then(self.locals)
        self.settle()

    def frozen(self) -> dict[str, Tensor]:
        """Of the tensors to average, frozen parameters and the buffers of a module."""
        return {
            name: self.locals[name]
            for name, tensor in self.averaged.items()
            if (not tensor.requires_grad if self.module is not None else is_frozen(tensor))
        }

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict, with its own tensors."""
        if self.module is None:
            return dict(self._given)
        state: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return state

    def slots(self) -> list[dict[str, Any]]:
        """Return the dicts in which modules hold parameters and buffers."""
        return [slots for i, slots in enumerate(self._slots) if slots and i % 3 < 2]

    def of(self, model: Source, options: Mapping[str, Any]) -> Tracking:
        """Another model's tensors under the names of this one.

        If this one was made from names and tensors, only those names count. What is one tensor here
        and several there is in `apart`.

        Raises:
            ValueError: If names or shapes differ.
        """
        if self.unnamed and isinstance(model, Module):
            model = model.parameters()
        other = Tracking(model, **options)
        its = other.averaged | other.parameters | other.buffers
        its = {alias: its[name] for alias, name in other.aliases.items() if name in its}
        if self.module is not None or self.unnamed:
            _check_unexpected("model", self.aliases, its)
        found: dict[str, Tensor] = {}
        for alias, name in self.aliases.items():
            if alias in its and found.setdefault(name, its[alias]) is not its[alias]:
                other.apart.append((alias, name, its[alias]))
        for attribute in ("averaged", "parameters", "buffers"):
            mine: dict[str, Tensor] = getattr(self, attribute)
            signatures = {name: _signature(tensor) for name, tensor in mine.items()}
            same = {name: found[name] for name in signatures if name in found}
            check_names("model", signatures, same)
            for alias, name, tensor in other.apart:
                if name in signatures:
                    check_names("model", {alias: signatures[name]}, {alias: tensor})
            setattr(other, attribute, same)
        other.locals = {name: local(tensor) for name, tensor in other.averaged.items()}
        return other

    def reshard(self) -> None:
        """Let FSDP drop the weights that a forward pass gathered, and go back to the shards."""
        for module in self._fsdp:
            module.reshard()


def _given(source: Any) -> tuple[dict[str, Tensor], bool]:
    """Tensors by name, and whether the names are but numbers, since none were given."""
    items = list(source.items() if isinstance(source, Mapping) else source)
    unnamed = not isinstance(source, Tensor) and all(isinstance(item, Tensor) for item in items)
    if unnamed:
        return {str(i): tensor for i, tensor in enumerate(items)}, True
    found: dict[str, Tensor] = {}
    for item in items:
        kinds = [type(part).__name__ for part in item] if isinstance(item, tuple | list) else []
        if not (len(kinds) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)):
            got = f"a pair of {kinds[0]} and {kinds[1]}" if len(kinds) == 2 else type(item).__name__
            raise TypeError(
                "expected a module, pairs of a name and a tensor, as named_parameters() gives, or "
                f"a list of tensors, got {got}"
            )
        if found.setdefault(item[0], item[1]) is not item[1]:
            raise ValueError(f"{item[0]}: expected each name once, got two tensors with it")
    return found, False


class _Seen(NamedTuple):
    averaged: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    twins: list[tuple[str, Tensor]]


def _has_memory(tensor: Tensor) -> bool:
    """Whether the elements of a tensor, or of its shard, are somewhere."""
    here = local(tensor)
    return here.layout is torch.strided and here.numel() > 0 and _address(here) > 0


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a subclass that holds several tensors
        return 0


def _identity(tensor: Tensor) -> Any:
    """What two tensors have in common if they are one: the same view of the same memory."""
    if not _has_memory(tensor):
        return id(tensor)
    here = local(tensor)
    steps = tuple(step for n, step in zip(here.shape, here.stride(), strict=True) if n > 1)
    flags = here.is_conj(), here.is_neg()
    return here.device, _address(here), tensor.shape, here.shape, steps, here.dtype, flags


def _overlaps(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tensors that have elements in common."""
    ranges = []
    for name, tensor in tensors.items():
        if _has_memory(tensor):
            here, start = local(tensor), _address(local(tensor))
            array = _addresses(here, start)
            end = np.lib.array_utils.byte_bounds(array)[1]
            ranges.append((str(here.device), start, end, name, array))
    before: list[tuple[str, int, int, str, Any]] = []  # those that may reach the next one
    for device, start, end, name, array in sorted(ranges, key=lambda found: found[:2]):
        before = [found for found in before if found[0] == device and found[2] > start]
        yield from ((found[3], name) for found in before if np.shares_memory(found[4], array))
        before.append((device, start, end, name, array))


def _addresses(tensor: Tensor, start: int) -> Any:
    """Return an array at the addresses of a tensor. NumPy compares them, and reads nothing."""
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(step * tensor.itemsize for step in tensor.stride()),
        "typestr": f"|V{tensor.itemsize}",
        "data": (start, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _is_expanded(tensor: Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _signature(tensor: Tensor) -> Signature:
    """The shape of a tensor and that of this process's shard, and the kind of its numbers."""
    kind = "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "whole"
    return tensor.shape, local(tensor).shape, kind


def check_names(what: str, expected: Mapping[str, Signature], got: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that names the missing, unexpected or misshapen tensors."""
    if missing := [name for name in expected if name not in got]:
        raise ValueError(f"{what}: expected {_listed(missing)}, got none of that name")
    _check_unexpected(what, expected, got)
    for name, signature in expected.items():
        if not isinstance(got[name], Tensor):
            raise ValueError(f"{what}: {name}: expected a tensor, got {type(got[name]).__name__}")
        *shapes, kind = _signature(got[name])
        for shape, its in zip(signature, shapes, strict=False):
            if shape != its:
                raise ValueError(
                    f"{what}: {name}: expected shape {tuple(shape)}, got {tuple(its)}; "
                    "averaged tensors must keep their shapes"
                )
        _check_values(f"{what}: {name}", got[name])
        if kind != signature[2]:
            raise ValueError(f"{what}: {name}: expected {signature[2]} numbers, got {kind} ones")


def _check_unexpected(what: str, expected: Iterable[str], got: Iterable[str]) -> None:
    if unexpected := [name for name in got if name not in expected]:
        raise ValueError(
            f"{what}: expected only the original names, got {_listed(unexpected)} as well"
        )


def _check_values(what: str, tensor: Tensor) -> None:
    """Raise a ValueError unless the values of a tensor can be read and written."""
    here = local(tensor)
    if here.is_meta:
        raise ValueError(f"{what}: expected a tensor with values, got one on the meta device")
    if here.layout is not torch.strided:
        raise ValueError(f"{what}: expected a dense tensor, got one of layout {here.layout}")
    if (here.is_floating_point() or here.is_complex()) and not _converts(here.dtype):
        raise ValueError(f"{what}: expected numbers that torch can add, got {here.dtype}")


@lru_cache
def _converts(dtype: torch.dtype) -> bool:
    """Whether torch can convert numbers of a dtype, which it cannot for 4-bit floats."""
    wide = torch.complex64 if dtype.is_complex else torch.float32
    try:
        torch.zeros(1, dtype=wide, device="cpu").to(dtype).to(wide)
    except RuntimeError:
        return False
    return True


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _same_shard(tensor: Any, shard: Tensor) -> bool:
    return tensor._local_tensor is shard
