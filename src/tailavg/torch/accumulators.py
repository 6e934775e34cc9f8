"""The store for many tensors: one sum and a few means of each, in flat memory.

Tensors of one dtype and device lie side by side in flat tensors, so folds and turns take a few
operations however many tensors there are. Only adding a sample visits them one by one. The sum is
where its tensors are; the means may be in another place, from which they are taken part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tailavg.core import state as layout
from tailavg.core.clock import SUM, Store, clock_for
from tailavg.core.rules import ExactWindow, Rule
from tailavg.core.windows import positive_int
from tailavg.torch.memory import Flat, Mean, Offload, Piece, Place, empty, place
from tailavg.torch.tracking import Tracking, check_names, local, sharded_like

__all__ = ["Accumulators"]

_LINE = 16  # elements: tensors start on a cache line
_SMALL = 8192  # elements: smaller tensors are added together, since a call costs more than they do
_BATCH = 32767  # elements: up to this size torch.cat is one loop
_PART = 1 << 20  # elements read at a time: they stay in the shared cache
_PART_ELSEWHERE = 1 << 22  # on an accelerator, where a call costs more
_ROUNDING = 128  # floats: an average of equal numbers is at most so many away, see `_rounds_to`


class _Plan(NamedTuple):
    """How to add tensors to the sum. The first of each pair is a part of the sum."""

    alike: tuple[list[Tensor], list[Tensor]]
    """Same dtype, device and order of elements: added all at once."""
    unlike: tuple[list[Tensor], list[Tensor]]
    """Another dtype or order."""
    gathered: list[tuple[Tensor, Tensor, list[Tensor]]]
    """Small tensors, gathered in the stage first: sum, stage, tensors."""
    staged: list[list[tuple[Tensor, Tensor, Tensor]]]
    """On another device, or of 8 bits: copied through the stage, one full stage at a time."""
    waits_for: set[torch.device]
    """The other devices to wait for."""


_NOTHING = _Plan(([], []), ([], []), [], [], set())


class Accumulators(Store):
    """The average of tensors that have the same names at every step."""

    def __init__(
        self,
        rule: Rule,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str | int | None,
        offload: Offload | Place = None,
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
        self.place = offload if isinstance(offload, Place) else place(offload, self.device)
        self._groups = [
            _Group(i, *kind, its, self.place) for i, (kind, its) in enumerate(members.items())
        ]
        forms = [group.form for group in self._groups]
        self._means = [self.place.mean(forms) for _ in range(rule.accumulators)]
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
        """See `Store`. A mean in another place is there before the sum changes."""
        mean = self._means[-1]
        with self.place.renewed(mean) as new:
            if new is not mean:
                for group in self._groups:
                    group.fold(mean, new, total, weight, carry)
        self._safe = None
        for group in self._groups:
            group.fold(mean, mean if new is mean else None, total, weight, carry)
        self._replace(-1, new)
        self._settle()

    def turn(self, gone: int, weight: float) -> None:
        """See `Store`."""
        means = self._means
        if weight:
            mean = means[gone - 1]
            if self.place.in_place:
                self._safe = None
            with self.place.renewed(mean) as new:
                for group in self._groups:
                    group.merge(mean, means[gone], weight, new)
            self._safe = None
            self._replace(gone - 1, new)
        self._safe = None
        last = self.place.emptied(means[gone])
        self._means = [*means[:gone], *means[gone + 1 :], last]
        for group in self._groups:
            group.sum.zero_()
        self._settle()

    def _replace(self, block: int, new: Mean) -> None:
        """Let one mean take the place of another."""
        old, self._means[block] = self._means[block], new
        if old is not new:
            self.place.emptied(old)

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
        before: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        """Write the average given by the clock's `terms` into tensors.

        Where the average of a `frozen` tensor is what it holds, up to rounding, its own values are
        written. `before` gets each tensor just before it is overwritten.
        """
        self.require_whole()
        held = [(weight, None if block == SUM else self._means[block]) for weight, block in terms]
        for group in self._groups:
            group.write(held, into, frozen, before)

    def state(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """The means of the blocks, empty blocks first, and the sum. Views, not copies."""
        partial = {name: view for group in self._groups for name, view in group.views()}
        return [mean.views() for mean in self._means], [partial]

    def state_dict(self, like: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """The state in the layout of `tailavg.core.state`, with tensors sharded like `like`."""
        self.require_whole()
        blocks, partial = (
            [
                {name: sharded_like(view, like[name]) for name, view in views.items()}
                if like
                else views
                for views in held
            ]
            for held in self.state()
        )
        empty = len(blocks) - len(self.clock.starts)
        blocks = [*blocks[empty:], *blocks[:empty]]  # always all: shapes stay the same
        return layout.state(
            self.clock.rule,
            dtype=str(self.dtype).removeprefix("torch."),
            count=self.clock.count,
            starts=self.clock.starts,
            blocks=blocks,
            folded=self.clock.folded,
            partial=partial[0],
        )

    def files(self) -> dict[int, Path]:
        """The files of closed blocks, by their number in the state."""
        held = len(self.clock.starts)
        means = self._means[len(self._means) - held : -1]
        return {i: path for i, mean in enumerate(means) if (path := mean.file()) is not None}

    def loaded(self, state: Mapping[str, Any], tracking: Tracking) -> Callable[[], None]:
        """Check a state of these tensors, or of a single tensor without a name.

        Returns:
            What resumes from it.
        """
        state = layout.check(state)
        layout.check_nan_policy(state)
        dtype = str(self.dtype).removeprefix("torch.")
        if layout.rule_from(state["rule"]) != self.clock.rule or state["dtype"] != dtype:
            raise ValueError(
                f"state: expected {self.clock.rule} in {dtype}, got "
                f"{layout.rule_from(state['rule'])} in {state['dtype']}; "
                "create the average with the rule and dtype of the state"
            )
        sums, held = dict(chain(*(group.views() for group in self._groups))), len(state["starts"])
        if not held <= len(state["blocks"]) <= len(self._means):
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
                for name, value in layout.named(saved, sums).items()
            }
            named = {tracking.aliases.get(name, name): tensors[name] for name in reversed(tensors)}
            if left_out := [name for name in named if name in tracking.parameters]:
                raise ValueError(
                    f"{what}: expected the parameters that are averaged here, got {left_out[0]} as "
                    "well; choose it, or if it is frozen, create the average with "
                    "trainable_only=False"
                )
            check_names(what, tracking.forms, named)
            for name, tensor in tensors.items():
                first = tracking.aliases.get(name, name)
                if tensor is not named[first]:
                    check_names(what, {name: tracking.forms[first]}, {name: tensor})
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
        layout.check_steps(state["count"], state["starts"], state["folded"])
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

    def _fill(self, blocks: Sequence[Mapping[str, Tensor]]) -> None:
        """Let the newest means have these values."""
        unused = len(self._means) - len(blocks)
        with ExitStack() as stack:
            new = [stack.enter_context(self.place.renewed(mean)) for mean in self._means[unused:]]
            for mean, values in zip(new, blocks, strict=True):
                self.whole &= not self.place.in_place
                mean.fill(values)
        self.whole = False
        for i, mean in enumerate(new):
            self._replace(unused + i, mean)
        for i in range(unused):
            self._means[i] = self.place.emptied(self._means[i])

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
        offload = self._offload if self.place.in_place else self.place
        moved = Accumulators(self.clock.rule, tensors, dtype or self.dtype, device, offload)
        moved.clock, moved.calls = self.clock, self.calls
        means, (sums,) = self.state()
        moved._fill(means[len(means) - len(self.clock.starts) :])
        for name, view in chain(*(group.views() for group in moved._groups)):
            view.copy_(sums[name])
        moved.whole = True
        self.whole = self.place.in_place  # what is in files is removed
        for mean in self._means:
            self.place.emptied(mean)
        return moved


class _Group:
    """The tensors whose accumulators share a dtype and a device."""

    def __init__(
        self,
        index: int,
        device: torch.device,
        dtype: torch.dtype,
        tensors: Mapping[str, Tensor],
        where: Place,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.pieces: dict[str, Piece] = {}
        self._index = index
        self._part = _PART if device.type == "cpu" else _PART_ELSEWHERE
        self._batches: list[list[str]] = [[]]  # small tensors, side by side
        self._large: list[str] = []
        start = used = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].numel() > _SMALL):
            size = tensor.numel()
            if size > _SMALL:
                start += -start % _LINE
                self._large.append(name)
            else:
                if used + size > _BATCH:
                    self._batches.append([])
                    start += -start % _LINE
                    used = 0
                self._batches[-1].append(name)
                used += size
            stride = tensor.stride() if _is_dense(tensor) else _contiguous(tensor.shape)
            self.pieces[name] = Piece(start, start + size, tensor.shape, stride)
            start += size
        pinned = device.type == "cpu" and any(t.device.type != "cpu" for t in tensors.values())
        self.form = Flat(start, dtype, device, self.pieces)
        self.sum = empty(start, dtype, device, pinned=pinned).zero_()
        stage = max(_BATCH, min(start, self._part))
        self._stage = empty(stage, dtype, device, pinned=pinned)
        room = stage if where.elsewhere(device) else 0
        self._rooms = [empty(room, dtype, device) for _ in range(2)]  # for parts of means
        self._plan = _NOTHING

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tensors of the model out of copies and pickles."""
        return self.__dict__ | {"_plan": _NOTHING}

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """The sum of each tensor, by name."""
        return ((name, piece.of(self.sum)) for name, piece in self.pieces.items())

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Work out how to add these tensors to the sum."""
        plan = _Plan(([], []), ([], []), [], [], set())
        parts: list[tuple[Tensor, Tensor]] = []  # to be staged
        gathered: set[str] = set()
        for batch in self._batches if self.device.type == "cpu" else ():
            flats = [self._flat(name, tensors[name]) for name in batch]
            if len(batch) > 1 and all(self._fits(flat) for flat in flats):
                start, stop = self.pieces[batch[0]].start, self.pieces[batch[-1]].stop
                plan.gathered.append((self.sum[start:stop], self._stage[: stop - start], flats))
                gathered.update(batch)
        for name, piece in self.pieces.items():
            if name in gathered:
                continue
            flat = self._flat(name, tensors[name])
            staged = flat.device != self.device or flat.itemsize == 1
            if staged and flat.dim() == 1:
                total = self.sum[piece.start : piece.stop]
                parts += zip(_split(total, self._part), _split(flat, self._part), strict=True)
                continue
            if staged:  # the order differs too: it gets a stage of its own
                stage = piece.shaped(empty(piece.size, self.dtype, self.device))
                plan.staged.append([(piece.of(self.sum), stage, flat)])
                continue
            group = plan.alike if self._fits(flat) else plan.unlike
            group[0].append(
                self.sum[piece.start : piece.stop] if flat.dim() == 1 else piece.of(self.sum)
            )
            group[1].append(flat)
        room = len(self._stage)
        for total, part in parts:
            end = room + len(part)
            if end > len(self._stage):
                plan.staged.append([])
                room, end = 0, len(part)
            plan.staged[-1].append((total, self._stage[room:end], part))
            room = end
        devices = {part.device for stages in plan.staged for _, _, part in stages}
        plan.waits_for.update(devices - {self.device})
        self._plan = plan

    def _flat(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as one dimension in memory order, if the sum has the same order."""
        tensor, piece = tensor.detach(), self.pieces[name]
        if _is_dense(tensor) and _order(tensor.shape, tensor.stride()) == _order(
            piece.shape, piece.stride
        ):
            return tensor.as_strided((piece.size,), (1,))
        return tensor

    def _fits(self, flat: Tensor) -> bool:
        return (flat.dtype, flat.device, flat.dim()) == (self.dtype, self.device, 1)

    def add(self, factor: float) -> None:
        """Add the bound tensors, times a factor, to the sum."""
        plan = self._plan
        for group in (plan.alike, plan.unlike):
            if group[0]:
                torch._foreach_add_(*group, alpha=factor)
        for total, stage, flats in plan.gathered:
            torch.cat(flats, out=stage)
            total.add_(stage, alpha=factor)
        for parts in plan.staged:
            for _, stage, part in parts:
                stage.copy_(part, non_blocking=True)
            for device in plan.waits_for:
                torch.accelerator.current_stream(device).synchronize()
            for total, stage, _ in parts:
                total.add_(stage, alpha=factor)

    def fold(self, old: Mean, new: Mean | None, total: float, weight: float, carry: float) -> None:
        """Fold the sum into a mean; the rounding error starts the next sum.

        The same as `tailavg.numpy.arithmetic.joined`, in place and part by part. If the new mean is
        another one, the sum stays as it is; without a new one, only the sum changes.
        """
        ahead = new not in (old, None)
        for start, stop in self._ranges():
            mean = old.load(self._index, start, stop, self._rooms[0])
            summed = self.sum[start:stop]
            if weight == 1.0:
                joint = mean if new is None else torch.mul(summed, 1.0 / total, out=mean)
                step = None
            elif not torch.isfinite(summed.sum() + mean.sum()):  # inf - inf is NaN
                joint = mean.mul_(1.0 - weight).add_(summed, alpha=weight / total)
                step = None
            else:
                step = self._rooms[1][: stop - start] if ahead else summed
                torch.mul(summed, 1.0 / total, out=step).sub_(mean).mul_(weight)
                joint = torch.add(mean, step, out=self._stage[: stop - start])
            if not ahead:
                if step is None:
                    summed.zero_()
                else:
                    step.add_(mean.sub_(joint)).mul_(carry)  # less the step that was taken
                    joint = mean.copy_(joint)
            if new is not None:
                new.store(self._index, start, joint)

    def merge(self, mean: Mean, gone: Mean, weight: float, new: Mean) -> None:
        """Join two means, the second with this weight."""
        for start, stop in self._ranges():
            joint, other = (
                one.load(self._index, start, stop, room)
                for one, room in zip((mean, gone), self._rooms, strict=True)
            )
            new.store(self._index, start, joint.mul_(1.0 - weight).add_(other, alpha=weight))

    def write(
        self,
        terms: Sequence[tuple[float, Mean | None]],
        into: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        before: Callable[[list[Tensor]], None] | None,
    ) -> None:
        """Write the average into tensors; see `Accumulators.write`. None stands for the sum."""

        def average(start: int, stop: int, out: Tensor) -> Tensor:
            for low, high in self._ranges(start, stop):
                part = out[low - start : high - start]
                for i, (weight, mean) in enumerate(terms):
                    held = (
                        self.sum[low:high]
                        if mean is None
                        else mean.load(self._index, low, high, self._rooms[0])
                    )
                    if i:
                        part.add_(held, alpha=weight)
                    else:
                        torch.mul(held, weight, out=part)
            return out

        for batch in self._batches:
            if batch:
                targets = [self._flat(name, into[name]) for name in batch]
                if before:
                    before(targets)
                start, stop = self.pieces[batch[0]].start, self.pieces[batch[-1]].stop
                stage = average(start, stop, self._stage[: stop - start])
                averages = stage.split([self.pieces[name].size for name in batch])  # type: ignore[no-untyped-call]
                for name, target, values in zip(batch, targets, averages, strict=True):
                    piece = self.pieces[name]
                    if name in frozen and _rounds_to(piece.shaped(values), frozen[name]):
                        into[name].copy_(frozen[name])
                    else:
                        target.copy_(values if target.dim() == 1 else piece.shaped(values))
        for name in self._large:
            target, piece = self._flat(name, into[name]), self.pieces[name]
            if name in frozen and self._is_still(piece, self._flat(name, frozen[name]), average):
                if before:
                    before([target])
                into[name].copy_(frozen[name])
                continue
            if target.dim() != 1:
                if before:
                    before([target])
                room = empty(piece.size, self.dtype, self.device)
                target.copy_(piece.shaped(average(piece.start, piece.stop, room)))
                continue
            start = piece.start
            for part in _split(target, self._part):
                if before:
                    before([part])
                stop = start + len(part)
                if self._fits(part):
                    average(start, stop, part)
                else:
                    part.copy_(average(start, stop, self._stage[: len(part)]))
                start = stop

    def _is_still(
        self, piece: Piece, flat: Tensor, average: Callable[[int, int, Tensor], Tensor]
    ) -> bool:
        """Whether the average of a large tensor is what it holds, up to rounding."""
        if flat.dim() != 1:
            room = empty(piece.size, self.dtype, self.device)
            return _rounds_to(piece.shaped(average(piece.start, piece.stop, room)), flat)
        start = piece.start
        for part in _split(flat, self._part):
            stop = start + len(part)
            if not _rounds_to(average(start, stop, self._stage[: len(part)]), part):
                return False
            start = stop
        return True

    def _ranges(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Parts that are worked on at a time."""
        stop = len(self.sum) if stop is None else stop
        size = min(self._part, len(self._stage))
        return ((low, min(low + size, stop)) for low in range(start, stop, size))


def _tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, np.ndarray) and value.flags.writeable and value.flags.aligned:
            return torch.from_numpy(value)  # a file, perhaps: it is but read
        if isinstance(value, np.ndarray | np.generic | list | tuple | int | float | complex):
            return torch.from_numpy(np.array(value))
        raise TypeError("not a tensor")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what}: expected a tensor, got {type(value).__name__}: {error}"
        ) from error


def _split(flat: Tensor, size: int) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = flat.split(size)  # type: ignore[no-untyped-call]
    return parts


def _rounds_to(average: Tensor, values: Tensor) -> bool:
    """Whether an average may be that of these values alone, rounded.

    A sum of 256 equal numbers is at most 86 floats away: half a float for each addition.
    """
    if not average.numel():
        return True
    values = values.to(average).add(0.0)  # no negative zeros
    if average.is_complex():
        average, values = torch.view_as_real(average), torch.view_as_real(values)
    # the bits of floats, as whole numbers, have the order of the floats
    bits = torch.int32 if average.itemsize == 4 else torch.int64
    low, high = torch.aminmax(average.view(bits) - values.view(bits))
    return max(-int(low), int(high)) <= _ROUNDING


def _order(shape: torch.Size, stride: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions longer than 1: they decide the order of elements."""
    return [pair for pair in zip(shape, stride, strict=True) if pair[0] != 1]


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted((d, n) for n, d in _order(tensor.shape, tensor.stride())):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True
