"""The store for many tensors: one sum and a few means of each, in flat memory.

Tensors of one dtype and device lie side by side in flat tensors, so folds and turns take a few
operations however many tensors there are. Only adding a sample visits them one by one. The sum is
where its tensors are; the means are in a `tailavg.torch.storage.Storage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tailavg.core.clock import SUM, Store, clock_for
from tailavg.core.rules import ExactWindow, Rule
from tailavg.core.windows import positive_int
from tailavg.io import state as states
from tailavg.torch.folder import FolderStorage
from tailavg.torch.layout import Layout, Slice
from tailavg.torch.storage import Block, Offload, storage_for
from tailavg.torch.tracking import Tracking, check_names, local, sharded_like

__all__ = ["Accumulators"]

_LINE = 16  # elements in a cache line
_SMALL = 8192  # elements: smaller tensors are added together, since a call costs more than they do
_BATCH = 32767  # elements: up to this size torch.cat is one loop
_CHUNK = 1 << 22  # elements that are worked on at a time
_ROUNDING = 128  # times the epsilon of the dtype, see `_rounds_to`


class _AddPlan(NamedTuple):
    """How to add tensors to the sum. The first of each pair is a part of the sum."""

    alike: tuple[list[Tensor], list[Tensor]]
    """Same dtype, device and order of elements: added all at once."""
    unlike: tuple[list[Tensor], list[Tensor]]
    """Another dtype or order."""
    gathered: list[tuple[Tensor, Tensor, list[Tensor]]]
    """Small tensors, gathered in the buffer first: sum, buffer, tensors."""
    buffered: list[tuple[Tensor, Tensor, Tensor]]
    """On another device, or of 8 bits: copied to the buffer first: sum, buffer, tensor."""


class Accumulators(Store):
    """The average of tensors that have the same names at every step."""

    def __init__(
        self,
        rule: Rule,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str | int | None,
        offload: Offload | FolderStorage = None,
    ) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype in (torch.float32, torch.float64)):
            raise TypeError(f"dtype: expected torch.float32 or torch.float64, got {dtype!r}")
        if isinstance(rule, ExactWindow):
            raise TypeError(
                f"rule: expected one that holds a few averages, got {rule}, which holds every "
                "sample; AnytimeWindow has the same variance"
            )
        self.clock = clock_for(rule)
        self.calls = 0  # since the last sample, or the start
        self.whole = True  # False while anything changes
        self.dtype = dtype
        self.device = None if device is None else torch.empty(0, device=device).device
        members: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            # 8-bit floats have no promotion rules
            small = tensor.is_floating_point() and tensor.itemsize < dtype.itemsize
            kind = (
                self.device or tensor.device,
                dtype if small else torch.promote_types(dtype, tensor.dtype),
            )
            members.setdefault(kind, {})[name] = tensor
        self._offload = offload
        self.storage = storage_for(offload, self.device)
        self._groups = [_Group(i, *kind, group) for i, (kind, group) in enumerate(members.items())]
        layouts = [group.layout for group in self._groups]
        self._blocks = [self.storage.new_block(layouts) for _ in range(rule.accumulators)]
        self._safe: tuple[int, list[int], int] | None = None
        self.bind(tensors)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take samples from these tensors from now on. Their shapes must be the original ones."""
        for group in self._groups:
            group.bind(tensors)

    def add(self, then: Callable[[], None] | None = None) -> None:
        """Take one sample: the current values of the bound tensors. Call `then` in the end."""
        clock = self.clock
        self.require_whole()
        self.whole = False
        if clock.count >= clock.next:
            self._prepare()
        factor = clock.factor
        for group in self._groups:
            group.add(factor)
        clock.count += 1
        self.calls = 0
        if then is not None:
            then()
        self.whole = True

    def _prepare(self) -> None:
        """Do what is due. If that fails before anything has changed, the average stays whole."""
        self._settle()
        try:
            self.clock.prepare(self)
        except BaseException:
            if self._safe is not None:
                self.clock.resume(*self._safe)
                self.whole = True
            raise

    def _settle(self) -> None:
        """What is held is what the clock says: go back to here if the next change fails."""
        self._safe = self.clock.count, self.clock.blocks, self.clock.folded

    def fold(self, total: float, weight: float, carry: float) -> None:
        """See `Store`. If a block is replaced, the new one is complete before the sum changes."""
        old, in_place = self._blocks[-1], self.storage.in_place
        if in_place:
            self._safe = None
        with old.rewritten() as new:
            for group in self._groups:
                group.fold(old, new, total, weight, carry, renew_sum=in_place)
        self._safe = None
        if not in_place:
            for group in self._groups:
                group.fold(old, None, total, weight, carry, renew_sum=True)
        self._replace(-1, new)
        self._settle()

    def turn(self, gone: int, weight: float) -> None:
        """See `Store`."""
        blocks = self._blocks
        if weight:
            if self.storage.in_place:
                self._safe = None
            with blocks[gone - 1].rewritten() as new:
                for group in self._groups:
                    group.merge(blocks[gone - 1], blocks[gone], weight, new)
            self._safe = None
            self._replace(gone - 1, new)
        self._safe = None
        last = blocks[gone].emptied()
        self._blocks = [*blocks[:gone], *blocks[gone + 1 :], last]
        for group in self._groups:
            group.sum.zero_()
        self._settle()

    def _replace(self, i: int, new: Block) -> None:
        """Let a new block take the place of one."""
        old, self._blocks[i] = self._blocks[i], new
        if old is not new:
            old.emptied()

    def require_whole(self) -> None:
        """Raise unless every update and load so far ran to its end."""
        if not self.whole:
            raise RuntimeError(
                "the average is not whole: an update or a load was interrupted half-way; "
                "load_state_dict() a saved state, or create a new average"
            )

    def write(
        self,
        terms: Sequence[tuple[float, int]],
        into: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
    ) -> None:
        """Write the average given by the clock's `terms` into tensors.

        Where the average of a `frozen` tensor is what it holds, up to rounding, its own values are
        written.
        """
        self.require_whole()
        summands = [(weight, None if i == SUM else self._blocks[i]) for weight, i in terms]
        for group in self._groups:
            group.write(summands, into, frozen)

    def _sums(self) -> dict[str, Tensor]:
        """Return the sums, by name: views, not copies."""
        return {name: view for group in self._groups for name, view in group.views()}

    def state_dict(self, like: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """Return the state in the layout of `tailavg.io.state`, with tensors sharded like `like`.

        Its tensors are views, not copies.
        """
        self.require_whole()

        def sharded(views: dict[str, Tensor]) -> dict[str, Tensor]:
            return (
                views if like is None else {n: sharded_like(v, like[n]) for n, v in views.items()}
            )

        empty = len(self._blocks) - len(self.clock.starts)
        blocks = [*self._blocks[empty:], *self._blocks[:empty]]  # always all: shapes stay the same
        return states.state(
            self.clock.rule,
            dtype=str(self.dtype).removeprefix("torch."),
            count=self.clock.count,
            starts=self.clock.starts,
            blocks=[sharded(block.views()) for block in blocks],
            folded=self.clock.folded,
            partial=sharded(self._sums()),
        ) | {"calls": self.calls}

    def files(self) -> dict[int, Path]:
        """Return the files of closed blocks, by their number in the state."""
        closed = self._blocks[len(self._blocks) - len(self.clock.starts) : -1]
        return {i: path for i, block in enumerate(closed) if (path := block.file()) is not None}

    def loaded(self, state: Mapping[str, Any], tracking: Tracking) -> Callable[[], None]:
        """Check a state of these tensors, or of a single tensor without a name.

        Returns:
            What resumes from it.
        """
        state = states.check(state)
        states.check_nan_policy(state)
        dtype = str(self.dtype).removeprefix("torch.")
        if states.rule_from(state["rule"]) != self.clock.rule or state["dtype"] != dtype:
            raise ValueError(
                f"state: expected {self.clock.rule} in {dtype}, got "
                f"{states.rule_from(state['rule'])} in {state['dtype']}; "
                "create the average with the rule and dtype of the state"
            )
        sums, held = self._sums(), len(state["starts"])
        if not held <= len(state["blocks"]) <= len(self._blocks):
            raise ValueError(
                f"state: sizes do not add up: {held} starts, {len(state['blocks'])} blocks"
            )
        found: list[dict[str, Tensor]] = []
        for i, saved in enumerate((*state["blocks"][:held], state["partial"])):
            what = f"state: block {i}" if i < held else "state: partial"
            if not isinstance(saved, Mapping) and not state["count"]:
                # an average without samples knows no shape
                found.append({name: torch.zeros((), device="cpu") for name in sums})
                continue
            if not isinstance(saved, Mapping) and len(sums) > 1:
                raise ValueError(f"{what}: expected tensors by name, got {type(saved).__name__}")
            tensors = {
                name: _tensor(f"{what}: {name}", value)
                for name, value in states.named(saved, sums).items()
            }
            named = {tracking.aliases.get(name, name): tensors[name] for name in reversed(tensors)}
            if left_out := [name for name in named if name in tracking.parameters]:
                raise ValueError(
                    f"{what}: expected the parameters that are averaged here, got {left_out[0]} as "
                    "well; choose it, or if it is frozen, create the average with "
                    "trainable_only=False"
                )
            check_names(what, tracking.signatures, named)
            for name, tensor in tensors.items():
                first = tracking.aliases.get(name, name)
                if tensor is not named[first]:
                    check_names(what, {name: tracking.signatures[first]}, {name: tensor})
                    if not torch.equal(local(tensor), local(named[first])):
                        raise ValueError(
                            f"{what}: {name}: expected the values of {first}, since the model has "
                            "one tensor with both names, got others"
                        )
            for name, view in sums.items():
                if named[name].dtype != view.dtype:
                    raise ValueError(
                        f"{what}: {name}: expected {view.dtype}, got {named[name].dtype}"
                    )
            found.append({name: local(named[name]) for name in sums})
        states.check_steps(state["count"], state["starts"], state["folded"])
        calls = positive_int(state.get("calls", 0), "state: calls", least=0)
        clock = clock_for(self.clock.rule)
        clock.restore(state["count"], state["starts"], state["folded"])

        def resume() -> None:
            self._fill(found[:held])
            self.whole = False
            for name, view in sums.items():
                view.copy_(found[-1][name])
            self.clock, self.calls = clock, calls
            self.whole = True

        return resume

    def _fill(self, means: Sequence[Mapping[str, Tensor]]) -> None:
        """Write these means into the newest blocks, and empty the others."""
        unused = len(self._blocks) - len(means)
        with ExitStack() as stack:
            rewritten = [block.rewritten() for block in self._blocks[unused:]]
            new = [cast("Block", stack.enter_context(block)) for block in rewritten]
            for block, values in zip(new, means, strict=True):
                self.whole &= not self.storage.in_place
                block.fill(values)
        self.whole = False
        for i, block in enumerate(new):
            self._replace(unused + i, block)
        for i in range(unused):
            self._blocks[i] = self._blocks[i].emptied()

    def to(
        self,
        device: torch.device | str | int | None,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
    ) -> Accumulators:
        """The same average on a device, and in another dtype if one is given.

        None stands for the device of the tensors.
        """
        self.require_whole()
        offload = self.storage if isinstance(self.storage, FolderStorage) else self._offload
        moved = Accumulators(self.clock.rule, tensors, dtype or self.dtype, device, offload)
        moved.clock, moved.calls = self.clock, self.calls
        used = self._blocks[len(self._blocks) - len(self.clock.starts) :]
        moved._fill([block.views() for block in used])
        sums = self._sums()
        for name, view in moved._sums().items():
            view.copy_(sums[name])
        moved.whole = True
        self.whole = self.storage.in_place  # files are removed
        for block in self._blocks:
            block.emptied()
        return moved


class _Group:
    """The tensors whose accumulators share a dtype and a device: their layout and their sum."""

    def __init__(
        self, index: int, device: torch.device, dtype: torch.dtype, tensors: Mapping[str, Tensor]
    ) -> None:
        self._index = index
        self._large = [name for name, tensor in tensors.items() if tensor.numel() > _SMALL]
        # first those that leave the next one on a cache line
        self._large.sort(key=lambda name: tensors[name].numel() % _LINE != 0)
        self._batches: list[list[str]] = []  # small tensors, side by side
        used = _BATCH + 1
        for name, tensor in tensors.items():
            if tensor.numel() <= _SMALL:
                used += tensor.numel()
                if used > _BATCH:
                    self._batches.append([])
                    used = tensor.numel()
                self._batches[-1].append(name)
        starts, size = {}, 0
        for name in (*self._large, *chain(*self._batches)):
            starts[name] = size
            size += tensors[name].numel()
        slices = {
            name: Slice(
                starts[name],
                starts[name] + tensor.numel(),
                tensor.shape,
                # its own, unless there are gaps between its elements
                torch.empty_like(tensor, device="meta").stride(),
            )
            for name, tensor in tensors.items()
        }
        self.layout = Layout(size, dtype, device, slices)
        pinned = device.type == "cpu" and any(t.device.type != "cpu" for t in tensors.values())
        self.sum = torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)
        buffer = max(_BATCH, min(size, _CHUNK))
        self._buffer = torch.empty(buffer, dtype=dtype, device=device, pin_memory=pinned)
        self._plan = _AddPlan(([], []), ([], []), [], [])

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tensors of the model out of copies and pickles."""
        return self.__dict__ | {"_plan": None}

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Return the sum of each tensor, by name."""
        return ((name, where.of(self.sum)) for name, where in self.layout.slices.items())

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Work out how to add these tensors to the sum."""
        plan = _AddPlan(([], []), ([], []), [], [])
        slices, device = self.layout.slices, self.layout.device
        flats = {name: self._flat(name, tensors[name]) for name in slices}
        gathered: set[str] = set()
        for batch in self._batches if device.type == "cpu" else ():
            if len(batch) > 1 and all(self._fits(flats[name]) for name in batch):
                total = self.sum[slices[batch[0]].start : slices[batch[-1]].stop]
                buffer = self._buffer[: len(total)]
                plan.gathered.append((total, buffer, [flats[name] for name in batch]))
                gathered.update(batch)
        for name, flat in flats.items():
            where, in_order = slices[name], flat.dim() == 1
            total = self.sum[where.start : where.stop] if in_order else where.of(self.sum)
            if name in gathered:
                continue
            if flat.device == device and flat.itemsize > 1:
                group = plan.alike if self._fits(flat) else plan.unlike
                group[0].append(total)
                group[1].append(flat)
            elif not in_order:  # it gets a buffer of its own
                plan.buffered.append((total, torch.empty_like(total), flat))
            else:
                for start, stop in self._chunks(0, where.size):
                    buffer = self._buffer[: stop - start]
                    plan.buffered.append((total[start:stop], buffer, flat[start:stop]))
        self._plan = plan

    def _flat(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as one dimension in memory order, if the sum has the same order."""
        tensor, where = tensor.detach(), self.layout.slices[name]
        stride = tensor.stride()
        if stride == where.stride or _order(tensor.shape, stride) == _order(*where[2:]):
            return tensor.as_strided((where.size,), (1,))
        return tensor

    def _fits(self, flat: Tensor) -> bool:
        return (flat.dtype, flat.device, flat.dim()) == (self.layout.dtype, self.layout.device, 1)

    def add(self, factor: float) -> None:
        """Add the bound tensors, times a factor, to the sum."""
        plan = self._plan
        for group in (plan.alike, plan.unlike):
            if group[0]:
                torch._foreach_add_(*group, alpha=factor)
        for total, buffer, flats in plan.gathered:
            torch.cat(flats, out=buffer)
            total.add_(buffer, alpha=factor)
        for total, buffer, part in plan.buffered:
            total.add_(buffer.copy_(part), alpha=factor)

    def fold(
        self,
        old: Block,
        new: Block | None,
        total: float,
        weight: float,
        carry: float,
        *,
        renew_sum: bool,
    ) -> None:
        """Write the old mean joined with the sum into a new block, or begin a new sum, or both."""
        for start, stop in self._chunks(0, len(self.sum)):
            part = self.sum[start:stop]
            mean, rest = _joined(old.load(self._index, start, stop), part, total, weight, carry)
            if new is not None:
                new.store(self._index, start, mean)
            if renew_sum:
                part.copy_(rest)

    def merge(self, old: Block, gone: Block, weight: float, new: Block) -> None:
        """Join two means, the second with this weight, and write them into a block."""
        for start, stop in self._chunks(0, len(self.sum)):
            joint = old.load(self._index, start, stop).mul(1.0 - weight)
            joint.add_(gone.load(self._index, start, stop), alpha=weight)
            new.store(self._index, start, joint)

    def write(
        self,
        summands: Sequence[tuple[float, Block | None]],
        into: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
    ) -> None:
        """Write the average into tensors; see `Accumulators.write`. None stands for the sum."""
        slices = self.layout.slices
        still = [
            name
            for name in slices
            if name in frozen and self._is_average(summands, name, frozen[name])
        ]
        for name in still:
            into[name].copy_(frozen[name])
        for batch in self._batches:
            start, stop = slices[batch[0]].start, slices[batch[-1]].stop
            values = self._average(summands, start, stop, self._buffer[: stop - start])
            parts = values.split([slices[name].size for name in batch])  # type: ignore[no-untyped-call]
            for name, part in zip(batch, parts, strict=True):
                if name not in still:
                    into[name].copy_(slices[name].shaped(part))
        for name in self._large:
            where, target = slices[name], self._flat(name, into[name])
            if name in still:
                continue
            if self._fits(target):
                self._average(summands, where.start, where.stop, target)
            elif target.dim() != 1:  # in another order
                values = torch.empty(where.size, dtype=self.layout.dtype, device=self.layout.device)
                self._average(summands, where.start, where.stop, values)
                target.copy_(where.shaped(values))
            else:
                for start, stop in self._chunks(where.start, where.stop):
                    values = self._average(summands, start, stop, self._buffer[: stop - start])
                    target[start - where.start : stop - where.start].copy_(values)

    def _average(
        self, summands: Sequence[tuple[float, Block | None]], start: int, stop: int, out: Tensor
    ) -> Tensor:
        """Write numbers [start, stop) of the average into `out`, and return it."""
        for low, high in self._chunks(start, stop):
            part = out[low - start : high - start]
            for i, (weight, block) in enumerate(summands):
                values = self.sum[low:high] if block is None else block.load(self._index, low, high)
                if i:
                    part.add_(values, alpha=weight)
                else:
                    torch.mul(values, weight, out=part)
        return out

    def _is_average(
        self, summands: Sequence[tuple[float, Block | None]], name: str, tensor: Tensor
    ) -> bool:
        """Whether the average of a tensor is what it holds, up to rounding."""
        where, flat = self.layout.slices[name], self._flat(name, tensor)
        if flat.dim() != 1:  # in another order
            flat = torch.empty(where.size, dtype=flat.dtype, device=flat.device)
            where.shaped(flat).copy_(tensor)
        return all(
            _rounds_to(
                self._average(summands, start, stop, self._buffer[: stop - start]),
                flat[start - where.start : stop - where.start],
            )
            for start, stop in self._chunks(where.start, where.stop)
        )

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return the ranges of numbers that are worked on at a time."""
        return ((low, min(low + _CHUNK, stop)) for low in range(start, stop, _CHUNK))


def _joined(
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
    if isinstance(value, Tensor):
        return value
    try:
        if not isinstance(value, np.ndarray | np.generic | list | tuple | int | float | complex):
            raise TypeError("not a tensor")  # np.asarray would fill memory with a long range
        array = np.asarray(value)
        usable = array.flags.writeable and array.flags.aligned  # as torch requires
        return torch.from_numpy(array if usable else array.copy())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: expected a tensor, got {type(value).__name__}") from error


def _rounds_to(average: Tensor, values: Tensor) -> bool:
    """Whether an average may be that of these values alone, rounded.

    A sum of 256 equal numbers is off by at most 43 times the epsilon, and each mean adds about one.
    """
    numbers = torch.finfo(average.dtype)
    rtol = _ROUNDING * numbers.eps
    atol = rtol * numbers.tiny  # of subnormal numbers
    return torch.allclose(average, values.to(average), rtol=rtol, atol=atol, equal_nan=True)


def _order(shape: torch.Size, stride: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions longer than 1: they decide the order of elements."""
    return [pair for pair in zip(shape, stride, strict=True) if pair[0] != 1]
