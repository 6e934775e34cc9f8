"""The store for many tensors: one sum and a few means of each, in flat memory.

Tensors of one dtype and device lie side by side in flat tensors, so folds and turns take a few
operations however many tensors there are. Only adding a sample visits them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tailavg.core import state as layout
from tailavg.core.clock import SUM, Store, clock_for
from tailavg.core.rules import ExactWindow, Rule
from tailavg.core.windows import positive_int
from tailavg.torch.memory import empty
from tailavg.torch.tracking import Tracking, check_names, local, sharded_like

__all__ = ["Accumulators"]

_LINE = 16  # elements: tensors start on a cache line
_SMALL = 8192  # elements: smaller tensors are added together, since a call costs more than they do
_BATCH = 32767  # elements: up to this size torch.cat is one loop
_PART = 1 << 20  # elements read at a time: they stay in the shared cache
_PART_ELSEWHERE = 1 << 22  # on an accelerator, where a call costs more
_ROUNDING = 128  # floats: an average of equal numbers is at most so many away, see `_rounds_to`


class _Piece(NamedTuple):
    """Where a tensor lies in the flat tensors, and in which order of elements."""

    start: int
    stop: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    def shaped(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride)

    def of(self, flat: Tensor) -> Tensor:
        return self.shaped(flat[self.start : self.stop])


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
        self._blocks = rule.accumulators
        members: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            # 8-bit floats have no promotion rules
            small = tensor.is_floating_point() and tensor.itemsize < dtype.itemsize
            kind = (
                self.device or tensor.device,
                dtype if small else torch.promote_types(dtype, tensor.dtype),
            )
            members.setdefault(kind, {})[name] = tensor
        self._groups = [_Group(*kind, tensors, self._blocks) for kind, tensors in members.items()]

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
        clock.prepare(self)
        factor = clock.factor
        for group in self._groups:
            group.add(factor)
        clock.count += 1
        self.calls = 0
        if then is not None:
            then()
        self.whole = True

    def fold(self, total: float, weight: float, carry: float) -> None:
        """See `Store`."""
        for group in self._groups:
            group.fold(total, weight, carry)

    def turn(self, gone: int, weight: float) -> None:
        """See `Store`."""
        for group in self._groups:
            group.turn(gone, weight)

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
        for group in self._groups:
            group.write(terms, into, frozen, before)

    def state(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """The means of the blocks, empty blocks first, and the sum. Views, not copies."""

        def views(flats: Sequence[Tensor]) -> dict[str, Tensor]:
            return {
                name: view
                for group, flat in zip(self._groups, flats, strict=True)
                for name, view in group.views(flat)
            }

        means = ([group.means[i] for group in self._groups] for i in range(self._blocks))
        return [views(flats) for flats in means], [views([group.sum for group in self._groups])]

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
        (blocks, partial), held = self.state(), len(state["starts"])
        if not held <= len(state["blocks"]) <= len(blocks):
            raise ValueError(
                f"state: sizes do not add up: {held} starts, {len(state['blocks'])} blocks"
            )
        copies = []
        for what, views, saved in [
            *(
                (f"state: block {i}", blocks[len(blocks) - held + i], state["blocks"][i])
                for i in range(held)
            ),
            ("state: partial", partial[0], state["partial"]),
        ]:
            if not isinstance(saved, Mapping) and not state["count"]:
                # an average without samples knows no shape
                copies += [(view, torch.zeros((), device="cpu")) for view in views.values()]
                continue
            if not isinstance(saved, Mapping) and len(views) > 1:
                raise ValueError(f"{what}: expected tensors by name, got {type(saved).__name__}")
            tensors = {
                name: _tensor(f"{what}: {name}", value)
                for name, value in layout.named(saved, views).items()
            }
            named = {tracking.aliases.get(name, name): tensors[name] for name in reversed(tensors)}
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
            for name, view in views.items():
                if named[name].dtype != view.dtype:
                    raise ValueError(
                        f"{what}: {name}: expected {view.dtype}, got {named[name].dtype}"
                    )
            copies += [(views[name], local(named[name])) for name in views]
        layout.check_steps(state["count"], state["starts"], state["folded"])
        calls = positive_int(state.get("calls", 0), "state: calls", least=0)
        clock = clock_for(self.clock.rule)
        clock.restore(state["count"], state["starts"], state["folded"])

        def resume() -> None:
            self.whole = False
            for view, value in copies:
                view.copy_(value)
            self.clock, self.calls = clock, calls
            self.whole = True

        return resume

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
        moved = Accumulators(self.clock.rule, tensors, dtype or self.dtype, device)
        moved.clock, moved.calls = self.clock, self.calls
        for new, old in zip(chain(*moved.state()), chain(*self.state()), strict=True):
            for name, view in new.items():
                view.copy_(old[name])
        return moved


class _Group:
    """The tensors whose accumulators share a dtype and a device."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tensors: Mapping[str, Tensor],
        accumulators: int,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.pieces: dict[str, _Piece] = {}
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
            self.pieces[name] = _Piece(start, start + size, tensor.shape, stride)
            start += size
        pinned = device.type == "cpu" and any(t.device.type != "cpu" for t in tensors.values())
        self.sum, *self.means = (
            empty(start, dtype, device, pinned=pinned).zero_() for _ in range(1 + accumulators)
        )
        stage = max(_BATCH, min(start, self._part))
        self._stage = empty(stage, dtype, device, pinned=pinned)
        self._plan = _NOTHING

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tensors of the model out of copies and pickles."""
        return self.__dict__ | {"_plan": _NOTHING}

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors inside a flat tensor, by name."""
        return ((name, piece.of(flat)) for name, piece in self.pieces.items())

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

    def fold(self, total: float, weight: float, carry: float) -> None:
        """Fold the sum into the newest mean; the rounding error starts the next sum.

        The same as `tailavg.numpy.arithmetic.joined`, in place and part by part.
        """
        for mean, summed in self._parts(self.means[-1], self.sum):
            if weight == 1.0:
                torch.mul(summed, 1.0 / total, out=mean)
                summed.zero_()
            elif not torch.isfinite(summed.sum() + mean.sum()):  # inf - inf is NaN
                mean.mul_(1.0 - weight).add_(summed, alpha=weight / total)
                summed.zero_()
            else:
                step = summed.mul_(1.0 / total).sub_(mean).mul_(weight)
                joint = torch.add(mean, step, out=self._stage[: len(mean)])
                mean.sub_(joint)  # minus the step that was taken
                step.add_(mean).mul_(carry)
                mean.copy_(joint)

    def turn(self, gone: int, weight: float) -> None:
        """Open a block in the memory of one that is dropped or merged."""
        means = self.means
        if weight:
            means[gone - 1].mul_(1.0 - weight).add_(means[gone], alpha=weight)
        self.means = [*means[:gone], *means[gone + 1 :], means[gone]]
        self.sum.zero_()

    def write(
        self,
        terms: Sequence[tuple[float, int]],
        into: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        before: Callable[[list[Tensor]], None] | None,
    ) -> None:
        """Write the average into tensors; see `Accumulators.write`."""
        flats = [
            (weight, self.sum if block == SUM else self.means[block]) for weight, block in terms
        ]

        def average(start: int, stop: int, out: Tensor) -> Tensor:
            return _combine([(weight, flat[start:stop]) for weight, flat in flats], out)

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
        self, piece: _Piece, flat: Tensor, average: Callable[[int, int, Tensor], Tensor]
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

    def _parts(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(
            *(_split(flat, min(self._part, len(self._stage))) for flat in flats), strict=True
        )


def _tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
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


def _combine(terms: Sequence[tuple[float, Tensor]], out: Tensor) -> Tensor:
    (weight, first), *rest = terms
    torch.mul(first, weight, out=out)
    for weight, tensor in rest:
        out.add_(tensor, alpha=weight)
    return out


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
