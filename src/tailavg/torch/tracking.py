"""`Tracking`: which tensors of a model are averaged, and a cheap check that they are the same.

Both averages use it: `is_current` or `refresh` before each sample, `of` for another model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from itertools import chain, combinations
from operator import attrgetter, is_
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_args

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
    "shard_of",
    "sharded_like",
    "unwrap",
]

Buffers = Literal["copy", "average", "skip"]
Choice = str | Sequence[str] | Callable[[str], bool] | None
Source = (
    Module
    | Sequence[Module]
    | Mapping[str, Tensor]
    | Iterable[tuple[str, Tensor]]
    | Iterable[Tensor]
)
Kind = Literal["parameter", "buffer", "non-persistent buffer"]

Call = TypeVar("Call", bound=Callable[..., Any])
Signature = tuple[torch.Size, torch.Size, str]
"""The shape of a tensor, the shape of this process's shard, and the kind of its numbers."""

_TRAINS = attrgetter("requires_grad")
_PLACE = (Tensor.data_ptr, Tensor.stride, attrgetter("nbytes"))  # where a tensor's elements are


def outside_autograd(call: Call) -> Call:
    """Return a function that runs without gradients, and outside `torch.inference_mode`."""
    return torch.inference_mode(False)(torch.no_grad()(call))


def unwrap(model: Module) -> Module:
    """Return the module inside DDP, DataParallel and torch.compile wrappers."""
    compiled = _imported("torch._dynamo", "OptimizedModule")
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(model, compiled):
            wrapper: Any = model
            model = wrapper._orig_mod
        else:
            return model


def _imported(module: str, name: str) -> Any:
    """Return a class for `isinstance`; () if its module is not imported, so no instance exists."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> bool:
    """Return whether this is a DTensor."""
    return isinstance(tensor, _imported("torch.distributed.tensor", "DTensor"))


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, and any other tensor unchanged."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_frozen(tensor: Tensor) -> bool:
    """Return whether this is a parameter that does not train. Plain tensors do not count."""
    return not tensor.requires_grad and isinstance(tensor, Parameter)


def sharded_like(shard: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor that a shard belongs to if `like` is one, otherwise the shard."""
    if not is_sharded(like):
        return shard
    dtensor: Any = like
    sharded: Tensor = type(dtensor).from_local(
        _with_own_storage(shard),
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )
    return sharded


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a tensor that every process has, if `like` is a DTensor."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    dtensor: Any = like
    mesh = dtensor.device_mesh
    whole = DTensor.from_local(
        tensor.to(dtensor.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return local(whole.redistribute(mesh, dtensor.placements))


def _with_own_storage(view: Tensor) -> Tensor:
    """Return the same memory with a storage of its own, as saving a DTensor requires."""
    start, size = view.storage_offset() * view.itemsize, view.numel() * view.itemsize
    if not start:
        return view
    storage: Any = view.untyped_storage()[start : start + size]
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())


def _walk(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """Yield every module with its prefix, unwrapped; shared modules once for each name."""
    module = unwrap(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"model: {prefix[:-1] or 'the model'}: expected a Python module, got a "
            f"{type(module).__name__}; average the model that it was compiled from, or pass its "
            "named_parameters() to ParameterAverage"
        )
    if isinstance(module, _imported("torch.distributed.fsdp", "FullyShardedDataParallel")):
        raise TypeError(
            f"model: {prefix[:-1] or 'the model'}: FullyShardedDataParallel replaces the parameters"
            " of a module by flat ones; shard the model with torch's fully_shard (FSDP2) instead"
        )
    yield prefix, module
    hooked = module.state_dict(keep_vars=True) if module._state_dict_hooks else {}
    for name, child in module._modules.items():
        if child is not None:
            unnamed = hooked and _omits_name(hooked, name, child)
            yield from _walk(child, prefix if unnamed else f"{prefix}{name}.")


def _omits_name(state: Mapping[str, Any], name: str, child: Module) -> bool:
    """Return whether a module's state dict omits the name of a child from its keys.

    Wrappers such as that of activation checkpointing remove the name in a hook.
    """
    tensors = child.state_dict(keep_vars=True)
    return bool(tensors) and all(
        f"{name}.{key}" not in state and (state.get(key) is value or not isinstance(value, Tensor))
        for key, value in tensors.items()
    )


class Tracking:
    """The tensors of a model by name: `averaged`, other `parameters` and other `buffers`.

    A tensor with several names is listed under the first; `aliases` maps every name to that one.
    Tensors that are the same view of the same memory count as one; `objects` has all of them. An
    averaged tensor that shares memory in any other way is an error. Expanded and sparse tensors,
    which cannot be written to, appear only in `aliases` and `objects`.

    A model may be a list of parts, each with the names of its own state dict. Of a non-persistent
    buffer that several parts have, such as a table of positions, only the first is listed.
    """

    modules: list[Module]
    """The parts of the model, without wrappers; none if the source was tensors."""

    aliases: dict[str, str]
    objects: dict[str, list[Tensor]]
    averaged: dict[str, Tensor]
    averaged_buffers: set[str]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    locals: dict[str, Tensor]
    """The shards of `averaged` that this process has."""

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
        self._options: dict[str, Any] = {
            "include": include,
            "exclude": exclude,
            "buffers": buffers,
            "trainable_only": trainable_only,
        }
        self.modules = _parts(source)
        self.unnamed = False  # whether the tensors came without names
        if not self.modules:
            self._given, self.unnamed = _given(source)
        self._fsdp: list[Any] = []
        self.signatures: dict[str, Signature] = {}
        self.untied: list[tuple[str, str, Tensor]] = []  # see `of`
        self._look()
        self.signatures = {name: _signature(tensor) for name, tensor in self.averaged.items()}

    def _tensors(self) -> Iterator[tuple[int, str, Tensor, Kind]]:
        """Yield every tensor under each of its names, with the number of its part, and its kind."""
        if not self.modules:
            yield from ((0, name, tensor, "parameter") for name, tensor in self._given.items())
        for part, model in enumerate(self.modules):
            for prefix, module in _walk(model):
                for name, tensor in module._parameters.items():
                    if tensor is not None:
                        yield part, prefix + name, tensor, "parameter"
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        saved = name not in module._non_persistent_buffers_set
                        kind: Kind = "buffer" if saved else "non-persistent buffer"
                        yield part, prefix + name, buffer, kind

    def _look(self) -> None:
        """Find the tensors that the model has now."""
        self.reshard()
        self.aliases, self.objects = {}, {}
        first: dict[Any, str] = {}
        trains = set(self.signatures)  # averaged tensors stay averaged
        not_buffers: set[str] = set()
        owners: dict[str, tuple[int, Any]] = {}  # the part that has a name first, and its tensor
        repeated: dict[str, str] = {}  # buffers that several parts have, and why that is an error
        for part, alias, tensor, kind in self._tensors():
            _check_available(alias, tensor)
            identity = _identity(tensor)
            owner, known = owners.setdefault(alias, (part, identity))
            if owner != part and identity != known:
                problem = f"model: parts {owner} and {part} have different tensors named {alias}; "
                if kind != "non-persistent buffer":
                    raise ValueError(
                        f"{problem}rename one, or pass nn.ModuleList(parts), which begins each "
                        "name with the number of the part"
                    )
                repeated[alias] = f"{problem}exclude this buffer"
                continue
            name = self.aliases[alias] = first.setdefault(identity, alias)
            objects = self.objects.setdefault(name, [])
            if not any(tensor is known for known in objects):
                objects.append(tensor)
            if kind == "parameter":
                not_buffers.add(name)
            if not (self._options["trainable_only"] and is_frozen(tensor)):
                trains.add(name)
        chosen = self._chosen("include") - self._chosen("exclude")
        chosen = {self.aliases[alias] for alias in chosen} & trains
        if self._options["buffers"] != "average":
            chosen &= not_buffers
        self.averaged, self.parameters, self.buffers = {}, {}, {}
        for name, (tensor, *_) in self.objects.items():
            writable = local(tensor).layout is torch.strided and not _is_expanded(tensor)
            if name in chosen and (tensor.is_floating_point() or tensor.is_complex()):
                if name in repeated:
                    raise ValueError(repeated[name])
                _check_values(name, tensor)
                if not writable:
                    raise ValueError(
                        f"{name}: the tensor is expanded, so its elements share memory; exclude "
                        "it, or call contiguous() on it"
                    )
                self.averaged[name] = tensor
            elif writable:
                (self.parameters if name in not_buffers else self.buffers)[name] = tensor
        for name, overlapping in _overlaps(self.objects):
            if name in self.averaged or overlapping in self.averaged:
                raise ValueError(
                    f"{name} and {overlapping} share part of their memory, so they cannot be "
                    "averaged; clone() one of them, or exclude both"
                )
        self.averaged_buffers = set(self.averaged) - not_buffers
        self.locals = {name: local(tensor) for name, tensor in self.averaged.items()}
        self._watch()

    def _chosen(self, option: Literal["include", "exclude"]) -> set[str]:
        """Return the names that an option chooses. Every pattern must match at least one name."""
        choice: Choice = self._options[option]
        if choice is None:
            return set(self.aliases) if option == "include" else set()
        if callable(choice):
            return {name for name in self.aliases if choice(name)}
        chosen = set()
        for pattern in [choice] if isinstance(choice, str) else choice:
            if not isinstance(pattern, str):
                raise TypeError(f"{option}: expected patterns or a function, got {choice!r}")
            matches = {name for name in self.aliases if fnmatchcase(name, pattern)}
            if not matches:
                example = next(iter(self.aliases))
                raise ValueError(
                    f"{option}: {pattern!r} matches no tensor; names look like {example!r}"
                )
            chosen |= matches
        return chosen

    def _watch(self) -> None:
        """Save what `is_current` compares. Keeping the tensors alive keeps their ids unique."""
        watched = [tensor for name in self.averaged for tensor in self.objects[name]]
        self._sharded = [tensor for tensor in watched if is_sharded(tensor)]
        self._shards = [local(tensor) for tensor in self._sharded]
        self._watched = [local(tensor) for tensor in watched]
        self._places = [list(map(place, self._watched)) for place in _PLACE]
        left_out = self.parameters.values() if self._options["trainable_only"] else ()
        self._frozen = [tensor for tensor in left_out if is_frozen(tensor)]
        walked = chain.from_iterable(map(_walk, self.modules))
        modules = list({id(module): module for _, module in walked}.values())
        fsdp = _imported("torch.distributed.fsdp", "FSDPModule")
        self._fsdp = [module for module in modules if isinstance(module, fsdp)]
        self.slots: list[dict[str, Any]] = []
        """The dicts in which modules hold parameters and buffers."""
        for module in modules:
            self.slots += [module._parameters, module._buffers]
        self._children: list[dict[str, Any]] = [module._modules for module in modules]
        self._members = list(self._slotted())
        self._ids: list[int] | None = list(map(id, self._members))

    def _slotted(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, chain(self.slots, self._children)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the ids out, so that a copy looks for its own tensors."""
        return self.__dict__ | {"_ids": None}

    def is_current(self) -> bool:
        """Return whether the model still has the same tensors at the same places in memory.

        This compares every tensor, at about 250 ns each. It notices `layer.weight = …`, a new
        submodule, `load_state_dict(assign=True)`, `parameter.data = …` and `model.to(…)`.
        """
        self.reshard()
        return (
            list(map(id, self._slotted())) == self._ids
            and [list(map(place, self._watched)) for place in _PLACE] == self._places
            and all(map(is_, map(local, self._sharded), self._shards))
            and not any(map(_TRAINS, self._frozen))
        )

    def refresh(self, then: Callable[[Mapping[str, Tensor]], None] | None = None) -> None:
        """Look again if the model changed; then call `then` with the tensors to average.

        Raises:
            ValueError: If names, shapes or ties differ. This object does not change.
        """
        if self.is_current():
            return
        new = copy(self)
        new._look()
        for alias, name in new.aliases.items():
            old_name = self.aliases.get(alias, name)
            if old_name != name and old_name in self.signatures:
                before = "had its own memory" if old_name == alias else f"was tied to {old_name}"
                now = "has its own memory" if name == alias else f"is tied to {name}"
                raise ValueError(
                    f"model: {alias} {before} when the average was created, and {now} now; tie "
                    "the same tensors as before, or create a new average"
                )
        if thawed := [name for name in new.averaged if name in self.parameters]:
            raise ValueError(
                f"model: parameters that were frozen when the average was created now train: "
                f"{_listed(thawed)}; create a new average, with trainable_only=False if frozen "
                "parameters are to be trained later"
            )
        check_names("model", self.signatures, new.averaged)
        if then is not None:
            then(new.locals)
        self.__dict__.update(new.__dict__)

    def averages_any(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether one of these tensors is averaged, or has the memory of one that is."""
        averaged = list(self.averaged.values())
        # since the last look, parameters may have been replaced
        averaged += [
            x for _, name, x, _ in self._tensors() if self.aliases.get(name) in self.averaged
        ]
        return not set(map(_identity, averaged)).isdisjoint(map(_identity, tensors))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that can be written to, by their first names."""
        return self.averaged | self.parameters | self.buffers

    @property
    def output_buffers(self) -> dict[str, Tensor]:
        """The buffers that outputs contain and swaps restore."""
        return {} if self._options["buffers"] == "skip" else self.buffers

    def frozen(self) -> dict[str, Tensor]:
        """Return the averaged tensors that are frozen parameters, or buffers of a module."""
        return {
            name: self.locals[name]
            for name, tensor in self.averaged.items()
            if (not tensor.requires_grad if self.modules else is_frozen(tensor))
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, or that of all its parts, with its own tensors."""
        if not self.modules:
            return dict(self._given)
        state: dict[str, Any]
        state, *others = [module.state_dict(keep_vars=True) for module in self.modules]
        for other in others:
            state.update(other)
        return state

    def is_computed(self, key: str, value: Any) -> bool:
        """Return whether a hook computed this entry of the state dict from tensors of the model."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or key in self.aliases:
            return False
        known = any(value is tensor for tensors in self.objects.values() for tensor in tensors)
        return not known and not key.endswith("_extra_state")

    def of(self, model: Source) -> Tracking:
        """Track another model's tensors under the names of this one.

        The other model may be inside a wrapper without tensors of its own. If this object was made
        from names and tensors, only those names count. Tensors that are tied here, but not in the
        other model, are in `untied` of the result.

        Raises:
            ValueError: If names or shapes differ.
        """
        if self.unnamed and (parts := _parts(model)):
            model = [parameter for part in parts for parameter in part.parameters()]
        other = Tracking(model, **self._options)
        tensors, theirs = self.tensors, other.tensors
        theirs = {alias: theirs[name] for alias, name in other.aliases.items() if name in theirs}
        if self.modules:
            theirs = _without_prefix(theirs, next(iter(tensors), ""))
        if self.modules or self.unnamed:
            _check_unexpected("model", self.aliases, theirs)
        matched: dict[str, Tensor] = {}
        for alias, name in self.aliases.items():
            if name in tensors and alias in theirs:
                tensor = theirs[alias]
                check_names("model", {alias: _signature(tensors[name])}, {alias: tensor})
                if matched.setdefault(name, tensor) is not tensor:
                    other.untied.append((alias, name, tensor))
        signatures = {name: _signature(tensor) for name, tensor in tensors.items()}
        check_names("model", signatures, matched)
        other.averaged = {name: matched[name] for name in self.averaged}
        other.parameters = {name: matched[name] for name in self.parameters}
        other.buffers = {name: matched[name] for name in self.buffers}
        other.locals = {name: local(tensor) for name, tensor in other.averaged.items()}
        return other

    def reshard(self) -> None:
        """Let FSDP drop the weights that a forward pass gathered, and go back to the shards."""
        for module in self._fsdp:
            module.reshard()


def _without_prefix(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return tensors without their common prefix, if one name is that prefix + `name`."""
    for alias in tensors:
        prefix = alias.removesuffix(name)
        if f".{alias}".endswith(f".{name}") and all(x.startswith(prefix) for x in tensors):
            return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    return dict(tensors)


def _parts(source: Any) -> list[Module]:
    """Return the modules of a source, without wrappers: one, or those of a list of modules."""
    parts = source if isinstance(source, list | tuple) else [source]
    return list(map(unwrap, parts)) if all(isinstance(x, Module) for x in parts) else []


def _given(source: Any) -> tuple[dict[str, Tensor], bool]:
    """Return tensors by name, and whether they came without: then their names are numbers."""
    items = list(source.items() if isinstance(source, Mapping) else source)
    unnamed = not isinstance(source, Tensor) and all(isinstance(item, Tensor) for item in items)
    if unnamed:
        return {str(i): tensor for i, tensor in enumerate(items)}, True
    tensors: dict[str, Tensor] = {}
    for item in items:
        kinds = [type(x).__name__ for x in item] if isinstance(item, tuple | list) else []
        if not (len(kinds) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)):
            got = f"a pair of {kinds[0]} and {kinds[1]}" if len(kinds) == 2 else type(item).__name__
            raise TypeError(
                "expected a module, a list of modules, pairs of a name and a tensor, as "
                f"named_parameters() gives, or a list of tensors, got {got}"
            )
        if tensors.setdefault(item[0], item[1]) is not item[1]:
            raise ValueError(f"{item[0]}: two tensors have this name; names must be unique")
    return tensors, False


def _check_available(name: str, tensor: Tensor) -> None:
    """Raise an error if this process does not have the elements of a tensor."""
    if is_lazy(tensor):
        raise ValueError(
            f"{name}: the tensor is not initialised; run a batch through the model first"
        )
    if hasattr(tensor, "ds_id"):
        raise TypeError(
            f"{name}: DeepSpeed's ZeRO stage 3 has partitioned this parameter, so it is "
            "empty; use stage 1 or 2, or shard the model with torch's fully_shard (FSDP2)"
        )


def _address(tensor: Tensor) -> int:
    """Return the address of the elements of a tensor, or of its shard; 0 if there are none."""
    shard = local(tensor)
    if shard.layout is not torch.strided or not shard.numel():
        return 0
    try:
        return shard.data_ptr()
    except RuntimeError:  # a subclass that holds several tensors
        return 0


def _identity(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    if not (address := _address(tensor)):
        return id(tensor)
    shard = local(tensor)
    steps = tuple(step for n, step in zip(shard.shape, shard.stride(), strict=True) if n > 1)
    flags = shard.is_conj(), shard.is_neg()
    return shard.device, address, tensor.shape, shard.shape, steps, shard.dtype, flags


def _overlaps(objects: Mapping[str, Sequence[Tensor]]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tensors that have elements in common."""
    views: dict[tuple[torch.device, int], list[tuple[str, Any]]] = {}  # by device and storage
    for name, (tensor, *_) in objects.items():
        if address := _address(tensor):
            shard = local(tensor)
            interface = {
                "version": 3,
                "shape": tuple(shard.shape),
                "strides": tuple(step * shard.itemsize for step in shard.stride()),
                "typestr": f"|V{shard.itemsize}",
                "data": (address, True),
            }
            # an array at the tensor's addresses, which may be on a device: NumPy only compares them
            array = np.asarray(SimpleNamespace(__array_interface__=interface))
            storage = shard.device, shard.untyped_storage().data_ptr()
            views.setdefault(storage, []).append((name, array))
    for group in views.values():
        for (name, array), (other_name, other_array) in combinations(group, 2):
            if np.shares_memory(array, other_array):
                yield name, other_name


def _is_expanded(tensor: Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _signature(tensor: Tensor) -> Signature:
    """Return the shape of a tensor, the shape of its shard, and the kind of its numbers."""
    kind = "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "integer"
    return tensor.shape, local(tensor).shape, kind


def check_names(what: str, expected: Mapping[str, Signature], got: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that names the missing, unexpected or misshapen tensors."""
    if missing := [name for name in expected if name not in got]:
        raise ValueError(f"{what}: missing {_listed(missing)}, which the average has")
    _check_unexpected(what, expected, got)
    for name, signature in expected.items():
        *shapes, kind = _signature(got[name])
        for shape, new_shape in zip(signature, shapes, strict=False):
            if shape != new_shape:
                raise ValueError(
                    f"{what}: {name}: expected shape {tuple(shape)}, got {tuple(new_shape)}; "
                    "averaged tensors must keep their shapes"
                )
        _check_values(f"{what}: {name}", got[name])
        if kind != signature[2]:
            raise ValueError(f"{what}: {name}: expected {signature[2]} numbers, got {kind} ones")


def _check_unexpected(what: str, expected: Iterable[str], got: Iterable[str]) -> None:
    if unexpected := [name for name in got if name not in expected]:
        raise ValueError(
            f"{what}: unexpected {_listed(unexpected)}, which the average does not have"
        )


def _check_values(what: str, tensor: Tensor) -> None:
    """Raise a ValueError unless the values of a tensor can be read and written."""
    shard = local(tensor)
    if shard.is_meta:
        raise ValueError(f"{what}: expected a tensor with values, got one on the meta device")
    if shard.layout is not torch.strided:
        raise ValueError(f"{what}: expected a dense tensor, got one of layout {shard.layout}")
    if "float4" in str(shard.dtype):
        raise ValueError(f"{what}: torch cannot add tensors of {shard.dtype}; exclude it")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
