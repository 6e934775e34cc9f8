"""`Accumulators`: one sum and a few means of each tensor of a model, in flat memory.

Both averages use it. Read `tailavg.core.clock` first: it says what to do at which step. Tensors of
one dtype and device lie side by side in flat tensors, so the number of operations in a fold or a
turn does not depend on the number of tensors. Only adding a sample visits the tensors one by one.
The sum is on the device of its tensors; the means are in a `MemoryStorage` or a `FolderStorage`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from tailavg.core.clock import SUM, Clock, Store, clock_for
from tailavg.core.rules import TrainingRule
from tailavg.core.windows import positive_int
from tailavg.io import state as states
from tailavg.torch.folder import FileBlock, FolderStorage
from tailavg.torch.storage import Layout, MemoryBlock, MemoryStorage, Slice, dtype_name
from tailavg.torch.tracking import Tracking, check_names, local, sharded_like

__all__ = ["Accumulators", "Group", "Offload", "Terms", "chunks", "joined"]

Block = MemoryBlock | FileBlock
Offload = str | os.PathLike[str] | None
Terms = Sequence[tuple[float, int]]
"""Pairs of a weight and the index of a block, or `SUM`: see `Clock.terms`."""
Read = Callable[[slice, Tensor], Tensor]
"""Writes a span of a flat tensor into another tensor of that size, and returns that."""

_LINE = 16  # elements in a cache line
_SMALL = 8192  # elements; smaller tensors share a call, which costs more than adding one of them
_BATCH = 32767  # elements; up to this size, torch.cat is one loop
CHUNK = 1 << 22  # elements that folds, turns and reads process at a time
_ROUNDING = 128  # times the epsilon of the dtype: see `_present_if_close`


class Accumulators(Store):
    """The average of tensors that have the same names at every step."""

    _KEYS: ClassVar[Sequence[tuple[str, str]]] = [("blocks", "partial")]
    """The keys, in a state, of each tensor that a block has, and of the sum that belongs to it."""

    def __init__(
        self,
        rule: TrainingRule,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str | int | None,
        offload: Offload | FolderStorage = None,
    ) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype in (torch.float32, torch.float64)):
            raise TypeError(f"dtype: expected torch.float32 or torch.float64, got {dtype!r}")
        self.rule, self.clock = rule, clock_for(rule)
        self.calls = 0  # calls since the last sample, or since the start
        self.complete = True  # False during a change, and after one that was interrupted
        self.dtype = dtype
        self.device = None if device is None else torch.empty(0, device=device).device
        members: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            # 8-bit floats have no promotion rules
            narrow = tensor.is_floating_point() and tensor.itemsize < dtype.itemsize
            kind = (
                self.device or tensor.device,
                dtype if narrow else torch.promote_types(dtype, tensor.dtype),
            )
            members.setdefault(kind, {})[name] = tensor
        # so that tensors are aligned in files
        wide_first = sorted(members, key=lambda kind: -kind[1].itemsize)
        self._offload = offload
        self.storage = _storage(offload, self.device)
        as_in_memory = isinstance(self.storage, MemoryStorage)  # in files, axes are in C order
        self._groups = [self._group(*kind, members[kind], as_in_memory) for kind in wide_first]
        layouts = [layout for group in self._groups for layout in group.layouts]
        self._blocks: list[Block] = [
            self.storage.new_block(layouts) for _ in range(rule.accumulators)
        ]
        self.bind(tensors)

    def _group(self, *args: Any) -> Group:
        return Group(*args)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take samples from these tensors from now on. Their shapes must be the original ones."""
        for group in self._groups:
            group.bind(tensors)

    def add(self, then: Callable[[], None] | None = None) -> None:
        """Take one sample: the current values of the bound tensors. Call `then` at the end."""
        self.require_complete()
        if self.clock.count >= self.clock.next:
            self._prepare()
        self.complete = False
        factor = self.clock.factor
        for group in self._groups:
            group.add(factor)
        self.clock.count += 1
        self.calls = 0
        if then is not None:
            then()
        self.complete = True

    def _prepare(self) -> None:
        """Fold and turn as is due. If that fails before the first change, restore the clock."""
        self._settle()
        try:
            self.clock.prepare(self)
        except BaseException:
            if self.complete:
                self.clock = self._settled
            raise

    def _settle(self) -> None:
        """Save the clock, which now agrees with the blocks and the sum: see `_prepare`."""
        self._settled = self.clock.copy()
        self.complete = True

    def fold(self, total: float, weight: float, carry: float) -> None:
        """See `Store`."""
        means = self._blocks[-1].flats()
        with self._rewritten(-1) as new:
            for i, (group, mean) in enumerate(zip(self._groups, means, strict=True)):
                for low, high in chunks(len(mean)):
                    summed = group.sum[low:high]
                    old = mean[low:high].to(summed.device)
                    joint, carried = joined(old, summed, total, weight, carry)
                    new.store(i, low, joint)
                    summed.copy_(carried)
        self._settle()

    def turn(self, gone: int, weight: float) -> None:
        """See `Store`."""
        if weight:
            pairs = zip(self._blocks[gone - 1].flats(), self._blocks[gone].flats(), strict=True)
            with self._rewritten(gone - 1) as new:
                for i, (mean, added) in enumerate(pairs):
                    for low, high in chunks(len(mean)):
                        device = self._groups[i].layout.device
                        joint = mean[low:high].to(device).mul(1.0 - weight)
                        joint.add_(added[low:high].to(device), alpha=weight)
                        new.store(i, low, joint)
        self.complete = False
        self._blocks.append(self._blocks.pop(gone))
        self._blocks[-1].clear()
        for group in self._groups:
            for total in group.sums:
                total.zero_()
        self._settle()

    @contextmanager
    def _rewritten(self, i: int) -> Iterator[Block]:
        """Yield the block to store a new mean in. The average is incomplete until `_settle`."""
        old = self._blocks[i]
        with old.rewritten() as new:
            self.complete = False
            yield new
        self._blocks[i] = new
        if old is not new:
            old.clear()

    def require_complete(self) -> None:
        """Raise if an interrupted update or load left the average incomplete."""
        if not self.complete:
            raise RuntimeError(
                "the average is incomplete: an update or a load was interrupted; load a saved "
                "state with load_state_dict(), or create a new average"
            )

    def write(self, terms: Terms, into: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        """Write the average given by the clock's `terms` into tensors.

        Where the average of a `frozen` tensor equals the tensor up to rounding, the tensor's own
        values are written.
        """
        self.require_complete()
        for group, average in zip(self._groups, self._averages(terms), strict=True):
            group.write(average, into, frozen)

    def _averages(self, terms: Terms) -> list[Read]:
        """Return functions that compute the average given by `terms`, one for each group."""
        sums = [group.sum for group in self._groups]
        flats = [sums if block == SUM else self._means(block) for _, block in terms]
        weights = [weight for weight, _ in terms]
        return [
            partial(_average, list(zip(weights, summands, strict=True)))
            for summands in zip(*flats, strict=True)
        ]

    def _means(self, block: int) -> list[Tensor]:
        """Return the mean of a block: a flat tensor for each group."""
        return self._blocks[block].flats()[:: len(self._KEYS)]

    def _parts(self, flats: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Return the tensors in the flat tensors of a block, or in all sums, as in `_KEYS`."""
        number = len(self._KEYS)
        return [self._views(flats[part::number]) for part in range(number)]

    def _views(self, flats: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the tensors in flat tensors, by name."""
        return {
            name: place.of(flat)
            for group, flat in zip(self._groups, flats, strict=True)
            for name, place in group.layout.slices.items()
        }

    def _sums(self) -> list[dict[str, Tensor]]:
        return self._parts([total for group in self._groups for total in group.sums])

    def _ordered(self) -> list[Block]:
        """Return the blocks in the order of a state: oldest first, blocks without samples last."""
        empty = len(self._blocks) - len(self.clock.starts)
        return [*self._blocks[empty:], *self._blocks[:empty]]

    def state_dict(self, like: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the state in the layout of `tailavg.io.state`, with tensors sharded like `like`.

        The tensors are views, not copies.
        """
        self.require_complete()

        def sharded(views: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: sharded_like(view, like[name]) for name, view in views.items()}

        sums = self._sums()
        # empty blocks too: torch.distributed.checkpoint needs the same keys in every average
        blocks = [self._parts(block.flats()) for block in self._ordered()]
        tensors: dict[str, Any] = {}
        for part, (of_blocks, of_sum) in enumerate(self._KEYS):
            tensors[of_blocks] = [sharded(block[part]) for block in blocks]
            tensors[of_sum] = sharded(sums[part])
        return states.state(
            self.clock.rule,
            dtype=dtype_name(self.dtype),
            count=self.clock.count,
            starts=self.clock.starts,
            folded=self.clock.folded,
            **tensors,
        ) | {"calls": self.calls}

    def files(self) -> dict[int, Path]:
        """Return the files of closed blocks, by their index in the state."""
        closed = self._ordered()[: max(0, len(self.clock.starts) - 1)]
        return {i: block.path for i, block in enumerate(closed) if block.path is not None}

    def loaded(
        self,
        state: Mapping[str, Any],
        tracking: Tracking,
        then: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """Check a state of these tensors, or of a single tensor without a name.

        Returns:
            A function that resumes from the state, and calls `then` at the end.
        """
        state = states.check(state)
        states.check_model_state(state, variance=len(self._KEYS) > 1)
        dtype = dtype_name(self.dtype)
        if states.rule_from(state["rule"]) != self.clock.rule or state["dtype"] != dtype:
            raise ValueError(
                f"state: expected {self.clock.rule} in {dtype}, got "
                f"{states.rule_from(state['rule'])} in {state['dtype']}; "
                "create the average with the rule and dtype of the state"
            )
        number = len(state["starts"])
        parts: list[list[dict[str, Tensor]]] = []
        sums: list[dict[str, Tensor]] = []
        for views, (of_blocks, of_sum) in zip(self._sums(), self._KEYS, strict=True):
            if not number <= len(state[of_blocks]) <= len(self._blocks):
                raise ValueError(
                    f"corrupt state: {number} block starts but {len(state[of_blocks])} {of_blocks}"
                )
            if state["count"] or isinstance(state[of_sum], Mapping):
                sums.append(_checked(f"state: {of_sum}", state[of_sum], views, tracking))
            else:  # an average of NumPy without samples has no shape
                sums.append({name: torch.zeros((), device="cpu") for name in views})
            what = f"state: {of_blocks.removesuffix('s')}"
            parts.append(
                [
                    _checked(f"{what} {i}", block, views, tracking)
                    for i, block in enumerate(state[of_blocks][:number])
                ]
            )
        states.check_steps(state["count"], state["starts"], state["folded"])
        calls = positive_int(state.get("calls", 0), "state: calls", least=0)
        clock = clock_for(self.clock.rule)
        clock.restore(state["count"], state["starts"], state["folded"])

        return lambda: self._fill(clock, calls, list(zip(*parts, strict=True)), sums, then)

    def _fill(
        self,
        clock: Clock,
        calls: int,
        parts: Sequence[Sequence[Mapping[str, Tensor]]],
        sums: Sequence[Mapping[str, Tensor]],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Resume from a state. If its tensors are views of this average, each stays in place.

        `parts` and `sums` are what `_parts` returns of each block, and of the sums.
        """
        blocks, number = self._ordered(), len(parts)
        with ExitStack() as stack:
            rewritten = [block.rewritten() for block in blocks[:number]]
            new = [cast("Block", stack.enter_context(context)) for context in rewritten]
            self.complete = False
            for block, saved in zip(new, parts, strict=True):
                for i, group in enumerate(self._groups):
                    for name, place in group.layout.slices.items():
                        for layout, part in enumerate(saved, i * len(saved)):
                            block.store(layout, place.start, place.ordered(part[name]).reshape(-1))
        self._blocks = [*blocks[number:], *new]
        for block in blocks:
            if block not in new:
                block.clear()
        for views, values in zip(self._sums(), sums, strict=True):
            for name, view in views.items():
                view.copy_(values[name])
        self.clock, self.calls = clock, calls
        if then is not None:
            then()
        self.complete = True

    def to(
        self,
        device: torch.device | str | int | None,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
    ) -> Accumulators:
        """Return the same average on a device, and in another dtype if one is given.

        None stands for the device of the tensors. The new average takes over the folder.
        """
        self.require_complete()
        offload = self.storage if isinstance(self.storage, FolderStorage) else self._offload
        moved = type(self)(self.rule, tensors, dtype or self.dtype, device, offload)
        used = self._ordered()[: len(self.clock.starts)]
        parts = [self._parts(block.flats()) for block in used]
        moved._fill(self.clock, self.calls, parts, self._sums())
        if isinstance(self.storage, FolderStorage):
            self.complete = False
            for block in self._blocks:
                block.clear()
        return moved


class Group:
    """The tensors whose accumulators share a dtype and a device: their layout and their sum."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tensors: Mapping[str, Tensor],
        as_in_memory: bool,
    ) -> None:
        large = [name for name, tensor in tensors.items() if tensor.numel() > _SMALL]
        # first those of whole cache lines, so that the next tensor is aligned, too
        large.sort(key=lambda name: tensors[name].numel() % _LINE != 0)
        self._runs = [[name] for name in large]
        """Names of tensors that lie side by side: one large tensor, or many small ones."""
        run_size = _BATCH + 1
        for name, tensor in tensors.items():
            if tensor.numel() <= _SMALL:
                run_size += tensor.numel()
                if run_size > _BATCH:
                    self._runs.append([])
                    run_size = tensor.numel()
                self._runs[-1].append(name)
        slices: dict[str, Slice] = {}
        size = 0
        for name in (name for run in self._runs for name in run):
            tensor = tensors[name]
            axes = list(range(tensor.dim()))
            if as_in_memory:  # such as channels_last
                axes.sort(key=tensor.stride().__getitem__, reverse=True)
            slices[name] = Slice(size, size := size + tensor.numel(), tensor.shape, axes)
        self.layout = Layout(size, dtype, device, slices)
        pinned = device.type == "cpu" and any(t.device.type != "cpu" for t in tensors.values())
        self.sum = torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)
        self.layouts, self.sums = [self.layout], [self.sum]
        """What a block holds of the group, and the sum that belongs to each."""
        buffer = max(_BATCH, min(size, CHUNK))
        self._buffer = torch.empty(buffer, dtype=dtype, device=device, pin_memory=pinned)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tensors of the model out of copies and pickles."""
        return self.__dict__ | {"_added": {}, "_gathered": [], "_buffered": []}

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Work out how to add these tensors to the sum."""
        self._added: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        """By dtype: views of the sum, and the tensors to add to them in one call."""
        self._gathered: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        """Small tensors, gathered in the buffer first: view of the sum, buffer, tensors."""
        self._buffered: list[tuple[Tensor, Tensor, Tensor]] = []
        """On another device or of 8 bits, copied to the buffer first: view, buffer, tensor."""
        for run in self._runs:
            members = [self._ordered(name, tensors[name].detach()) for name in run]
            if len(run) > 1 and self.sum.device.type == "cpu" and all(map(self._fits, members)):
                view = self.sum[self._span(run)]
                flat = [tensor.view(-1) for tensor in members]
                self._gathered.append((view, self._buffer[: len(view)], flat))
                continue
            for name, tensor in zip(run, members, strict=True):
                view = self._ordered(name, self.layout.slices[name].of(self.sum))
                if tensor.device == view.device and tensor.itemsize > 1:
                    views, added = self._added.setdefault(tensor.dtype, ([], []))
                    views.append(view)
                    added.append(tensor)
                elif not tensor.is_contiguous():  # it cannot be split into flat chunks
                    self._buffered.append((view, torch.empty_like(view), tensor))
                else:
                    view, tensor = view.view(-1), tensor.view(-1)
                    for low, high in chunks(len(view)):
                        buffer = self._buffer[: high - low]
                        self._buffered.append((view[low:high], buffer, tensor[low:high]))

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor with its axes in the order of the sum."""
        return self.layout.slices[name].ordered(tensor)

    def _fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the dtype, device and order of elements of the sum."""
        same_kind = (tensor.dtype, tensor.device) == (self.sum.dtype, self.sum.device)
        return same_kind and tensor.is_contiguous()

    def _span(self, run: Sequence[str]) -> slice:
        return slice(self.layout.slices[run[0]].start, self.layout.slices[run[-1]].stop)

    def add(self, factor: float) -> None:
        """Add the bound tensors, times a factor, to the sum."""
        for views, tensors in self._added.values():
            torch._foreach_add_(views, tensors, alpha=factor)
        for view, buffer, small in self._gathered:
            torch.cat(small, out=buffer)
            view.add_(buffer, alpha=factor)
        for view, buffer, tensor in self._buffered:
            view.add_(buffer.copy_(tensor), alpha=factor)

    def write(self, read: Read, into: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        """Write the average that `read` computes into tensors; see `Accumulators.write`."""
        for run in self._runs:
            if len(run) == 1:
                self.write_tensor(read, run[0], into[run[0]], frozen.get(run[0]))
                continue
            span = self._span(run)
            sizes = [into[name].numel() for name in run]
            values = read(span, self._buffer[: span.stop - span.start])
            averages = values.split(sizes)  # type: ignore[no-untyped-call]
            for name, average in zip(run, averages, strict=True):
                target, present = self._ordered(name, into[name]), frozen.get(name)
                present = None if present is None else self._ordered(name, present)
                target.copy_(_present_if_close(average.view(target.shape), present))

    def write_tensor(
        self, read: Read, name: str, target: Tensor, present: Tensor | None = None
    ) -> None:
        """Write the average into one tensor in chunks, without a buffer if possible."""
        start, stop, *_ = self.layout.slices[name]
        target = self._ordered(name, target.detach())
        present = None if present is None else self._ordered(name, present)
        contiguous = target.is_contiguous()
        flat = target.view(-1) if contiguous else target.new_empty(stop - start)
        direct = present is None and self._fits(target)
        for low, high in chunks(stop - start):
            out = flat[low:high] if direct else self._buffer[: high - low]
            values = read(slice(start + low, start + high), out)
            if not direct:
                chunk = None if present is None else present.reshape(-1)[low:high]
                flat[low:high] = _present_if_close(values, chunk)
        if not contiguous:
            target.copy_(flat.view(target.shape))


def _average(summands: Sequence[tuple[float, Tensor]], span: slice, out: Tensor) -> Tensor:
    """Write a span of the weighted sum of flat tensors into `out`, and return it."""
    for i, (weight, flat) in enumerate(summands):
        values = flat[span].to(out.device)
        if i:
            out.add_(values, alpha=weight)
        else:
            torch.mul(values, weight, out=out)
    return out


def chunks(size: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of elements that are processed at a time."""
    return ((low, min(low + CHUNK, size)) for low in range(0, size, CHUNK))


def _present_if_close(average: Tensor, present: Tensor | None) -> Tensor:
    """Return the average, but `present` where the two differ only by rounding.

    A sum of 256 equal numbers is off by at most 43 times the epsilon, and each mean adds about one.
    """
    if present is None:
        return average
    limits = torch.finfo(average.dtype)
    rtol = _ROUNDING * limits.eps
    atol = rtol * limits.tiny  # for subnormal numbers
    present = present.to(average)
    same = torch.isclose(average, present, rtol=rtol, atol=atol, equal_nan=True)
    return torch.where(same, present, average)


def joined(
    mean: Tensor, summed: Tensor, total: float, weight: float, carry: float
) -> tuple[Tensor, Tensor]:
    """Return the mean joined with a sum, and the rounding error, which starts the next sum.

    The same operations as in `tailavg.numpy.arithmetic.joined`.
    """
    if weight == 1.0:
        return summed.mul(1.0 / total), torch.zeros_like(summed)
    if not torch.isfinite(summed.sum() + mean.sum()):  # inf - inf is NaN
        joint = mean.mul(1.0 - weight).add_(summed, alpha=weight / total)
        return joint, torch.zeros_like(summed)
    step = summed.mul(1.0 / total).sub_(mean).mul_(weight)
    joint = mean + step
    return joint, step.add_(mean - joint).mul_(carry)


def _tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray | np.generic):
        with suppress(TypeError):  # torch has no such dtype
            value = torch.from_numpy(np.require(value, requirements=("ALIGNED", "WRITEABLE")))
    if not isinstance(value, Tensor):
        raise ValueError(f"{what}: expected a tensor, got {type(value).__name__}")
    return value


def _checked(
    what: str, saved: Any, sums: Mapping[str, Tensor], tracking: Tracking
) -> dict[str, Tensor]:
    """Return this process's shards of saved tensors by the names of the sums.

    Raises:
        ValueError: If names, shapes or dtypes differ.
    """
    if not isinstance(saved, Mapping) and len(sums) > 1:
        raise ValueError(f"{what}: expected tensors by name, got {type(saved).__name__}")
    tensors: dict[str, Tensor] = {}
    for alias, value in states.named(saved, sums).items():
        name = tracking.aliases.get(alias, alias)
        if name in tensors:
            raise ValueError(
                f"{what}: {name} and {alias} are tied in this model, but separate in the state; "
                "load the state into a model that does not tie them"
            )
        tensors[name] = _tensor(f"{what}: {alias}", value)
    if left_out := [name for name in tensors if name in tracking.parameters]:
        raise ValueError(
            f"{what}: {left_out[0]} is not averaged here; include it, or if it is frozen, create "
            "the average with trainable_only=False"
        )
    check_names(what, tracking.signatures, tensors)
    for name, view in sums.items():
        if tensors[name].dtype != view.dtype:
            raise ValueError(f"{what}: {name}: expected {view.dtype}, got {tensors[name].dtype}")
    return {name: local(tensor) for name, tensor in tensors.items()}


def _storage(
    offload: Offload | FolderStorage, device: torch.device | None
) -> MemoryStorage | FolderStorage:
    """Return the storage for `offload`. None as `device` is the device of the tensors."""
    if isinstance(offload, FolderStorage):  # `Accumulators.to` passes it on
        return offload
    if offload is None or offload == "cpu":
        return MemoryStorage(device if offload is None else torch.device("cpu"))
    if not isinstance(offload, str | os.PathLike):
        raise TypeError(f'offload: expected None, "cpu" or a folder, got {offload!r}')
    if isinstance(offload, str):
        with suppress(RuntimeError):  # if this is no device
            torch.device(offload.lower() or "cpu")
            raise ValueError(
                f'offload: expected None, "cpu" or a folder, got {offload!r}; a folder of that '
                f'name is "./{offload}"'
            )
    return FolderStorage(offload)
