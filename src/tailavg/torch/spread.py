"""`SpreadAccumulators`: the average of tensors, and the variance of the samples around it.

`ParameterAverage(variance=True)` uses it in place of `Accumulators`; read that first. Beside the
mean, each block has the variance of its samples. Beside the sum of the samples since the last fold
is the sum of their squared deviations from a center: the mean of the open block or, before the
first fold of that block, its first sample. So a constant that is large beside the variance cancels
before it is squared, and float32 is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from tailavg.core.clock import FOLD, SUM
from tailavg.core.rules import TrainingRule
from tailavg.torch.accumulators import Accumulators, Group, Offload, Read, Terms, chunks, joined
from tailavg.torch.folder import FolderStorage
from tailavg.torch.storage import Layout

__all__ = ["SpreadAccumulators"]

_BATCH = 1 << 18  # elements of a sample that are processed at a time

Variance = Callable[[slice], Tensor]
"""Returns the variance in a span of a flat tensor."""


class SpreadAccumulators(Accumulators):
    """The average of real tensors, and the variance of the samples around it."""

    _KEYS: ClassVar = [("blocks", "partial"), ("variances", "squares")]
    _groups: list[_SpreadGroup]  # type: ignore[assignment]

    def __init__(
        self,
        rule: TrainingRule,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str | int | None,
        offload: Offload | FolderStorage = None,
    ) -> None:
        for name, tensor in tensors.items():
            if tensor.is_complex():
                raise TypeError(f"variance: {name} is complex; exclude it, or leave out variance")
        super().__init__(rule, tensors, dtype, device, offload)

    def _group(self, *args: Any) -> Group:
        return _SpreadGroup(*args)

    def add(self, then: Callable[[], None] | None = None) -> None:
        """See `Accumulators`."""
        self.require_complete()
        if self.clock.count >= self.clock.next:
            self._prepare()
        if self.clock.count == self.clock.blocks[-1]:
            self._begin_block()
        factor, centers = self.clock.factor, self._means(-1)

        def finish() -> None:
            for group, center in zip(self._groups, centers, strict=True):
                group.add_squares(factor, center)
            if then is not None:
                then()

        super().add(finish)

    def _begin_block(self) -> None:
        """Store the coming sample as the center of a block without samples."""
        with self._rewritten(-1) as new:
            for i, group in enumerate(self._groups):
                for low, sample in group.samples():
                    new.store(2 * i, low, sample)
                    new.store(2 * i + 1, low, torch.zeros_like(sample))
        self._settle()

    def fold(self, total: float, weight: float, carry: float) -> None:
        """See `Store`."""
        flats = self._blocks[-1].flats()
        with self._rewritten(-1) as new:
            for i, group in enumerate(self._groups):
                for low, high in chunks(group.layout.size):
                    mean, variance = group.chunk(flats[2 * i : 2 * i + 2], low, high)
                    summed, squared = group.sum[low:high], group.squares[low:high]
                    step = summed.mul(1.0 / total).sub_(mean)
                    squared.addcmul_(step, step, value=-total * weight)
                    joint, carried = joined(mean, summed, total, weight, carry)
                    new.store(2 * i, low, joint)
                    summed.copy_(carried)
                    joint, carried = joined(variance, squared, total, weight, carry)
                    new.store(2 * i + 1, low, joint.clamp_(min=0.0))
                    squared.copy_(carried)
        self._settle()

    def turn(self, gone: int, weight: float) -> None:
        """See `Store`."""
        if weight:
            flats, added_flats = self._blocks[gone - 1].flats(), self._blocks[gone].flats()
            with self._rewritten(gone - 1) as new:
                for i, group in enumerate(self._groups):
                    for low, high in chunks(group.layout.size):
                        mean, variance = group.chunk(flats[2 * i : 2 * i + 2], low, high)
                        added, spread = group.chunk(added_flats[2 * i : 2 * i + 2], low, high)
                        step = added - mean
                        variance = variance.mul(1.0 - weight).add_(spread, alpha=weight)
                        variance.addcmul_(step, step, value=weight * (1.0 - weight))
                        new.store(2 * i, low, mean.mul(1.0 - weight).add_(added, alpha=weight))
                        new.store(2 * i + 1, low, variance)
        super().turn(gone, 0.0)

    def variances(
        self, terms: Terms, divisor: float, like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the variance of the samples, weighed by `terms`, over `divisor`, by name.

        The tensors have the dtypes of the accumulators, and otherwise are like those in `like`.
        """
        self.require_complete()
        into: dict[str, Tensor] = {}
        for group, variance in zip(self._groups, self._variances(terms), strict=True):
            read = partial(_quotient, variance, divisor)
            for name in group.layout.slices:
                into[name] = torch.empty_like(like[name], dtype=group.layout.dtype)
                group.write_tensor(read, name, into[name])
        return into

    def write_samples(
        self,
        terms: Terms,
        scale: float,
        noise: Callable[[str, torch.dtype], Tensor | None],
        into: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
    ) -> None:
        """Write the average plus `scale` standard deviations times noise into tensors.

        `noise` returns that of a tensor in a dtype; None leaves it at the average. It is called in
        the order of `into`, which does not depend on how the accumulators are grouped.
        """
        self.require_complete()
        averages, variances = self._averages(terms), self._variances(terms)
        groups = {
            name: (group, average, variance)
            for group, average, variance in zip(self._groups, averages, variances, strict=True)
            for name in group.layout.slices
        }
        for name, target in into.items():
            group, read, variance = groups[name]
            drawn = noise(name, group.layout.dtype)
            if drawn is not None:
                place = group.layout.slices[name]
                flat = place.ordered(drawn).reshape(-1)
                read = partial(_sample, read, variance, scale, flat, place.start)
            group.write_tensor(read, name, target, frozen.get(name))

    def _variances(self, terms: Terms) -> list[Variance]:
        """Return functions that compute the variance given by `terms`, one for each group."""
        # the sum is around the mean of the newest block, which is also the block of index SUM
        centers = self._means(terms[-1][1])
        blocks = [(weight, self._blocks[i].flats()) for weight, i in terms if i != SUM]
        of_sum = next((weight for weight, i in terms if i == SUM), 0.0)
        in_sum = 1.0 - sum(weight for weight, _ in blocks) if of_sum else 0.0

        def of_group(i: int, group: _SpreadGroup) -> Variance:
            parts = [(weight, block[2 * i : 2 * i + 2]) for weight, block in blocks]

            def variance(span: slice) -> Tensor:
                low, high = span.start, span.stop
                (center,) = group.chunk([centers[i]], low, high)
                shift, spread = torch.zeros_like(center), torch.zeros_like(center)
                for weight, part in parts:
                    mean, within = group.chunk(part, low, high)
                    step = mean - center
                    shift.add_(step, alpha=weight)
                    spread.add_(within, alpha=weight).addcmul_(step, step, value=weight)
                if of_sum:
                    shift.add_(group.sum[span].mul(of_sum).sub_(center, alpha=in_sum))
                    spread.add_(group.squares[span], alpha=of_sum)
                spread.addcmul_(shift, shift, value=-1.0).clamp_(min=0.0)
                # what rounding makes of a spread of 0: errors of the sum, and of the difference
                eps = torch.finfo(center.dtype).eps
                rounding = center.add(shift).abs_().mul_(eps * FOLD / 2)
                rounding.add_(shift.abs_(), alpha=2.0 * eps**0.5)
                return spread.masked_fill_(spread.sqrt() <= rounding, 0.0)

            return variance

        return [of_group(i, group) for i, group in enumerate(self._groups)]


class _SpreadGroup(Group):
    """A group whose blocks have variances beside the means, and squares beside the sum."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.squares = torch.zeros_like(self.sum)
        self.sums = [self.sum, self.squares]
        self.layouts = [_prefixed("mean.", self.layout), _prefixed("variance.", self.layout)]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_batches": []}

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Group`."""
        super().bind(tensors)
        self._batches: list[tuple[int, Tensor, list[Tensor], list[Tensor]]] = []
        """Where a part of the sample starts in the sum, the part, and what to copy into it first:
        views of it, and tensors. A part is in the buffer, or a tensor of the model itself."""
        for start, tensors_of_batch in self._adjacent(tensors):
            first, *others = tensors_of_batch
            if not others and self._fits(first):
                self._batches.append((start, first.view(-1), [], []))
                continue
            sizes = [tensor.numel() for tensor in tensors_of_batch]
            if sum(sizes) > len(self._buffer):  # a row that is not contiguous
                self._buffer = self._buffer.new_empty(sum(sizes))
            part = self._buffer[: sum(sizes)]
            pairs = zip(torch.split(part, sizes), tensors_of_batch, strict=True)
            views = [view.view(tensor.shape) for view, tensor in pairs]
            self._batches.append((start, part, views, tensors_of_batch))

    def _adjacent(self, tensors: Mapping[str, Tensor]) -> list[tuple[int, list[Tensor]]]:
        """Return small tensors, and parts of large ones, in the order of the sum, in batches."""
        batches: list[tuple[int, list[Tensor]]] = []
        size = 0  # of the last batch
        for name, place in self.layout.slices.items():
            tensor, start = place.ordered(tensors[name].detach()), place.start
            rows = tensor.view(-1) if tensor.is_contiguous() else tensor
            for part in torch.split(rows, max(1, _BATCH // max(1, rows[:1].numel()))):
                if not batches or size + part.numel() > _BATCH:
                    batches.append((start, []))
                    size = 0
                batches[-1][1].append(part)
                size += part.numel()
                start += part.numel()
        return batches

    def samples(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts of the sample, and where each starts in the sum."""
        for start, part, views, tensors in self._batches:
            if views:
                torch._foreach_copy_(views, tensors)
            yield start, part

    def add_squares(self, factor: float, center: Tensor) -> None:
        """Add the squared deviations of the sample from a center, times a factor."""
        for low, part in self.samples():
            high = low + len(part)
            step = self._buffer[: len(part)]
            torch.sub(part, center[low:high].to(step.device), out=step)
            self.squares[low:high].addcmul_(step, step, value=factor)

    def chunk(self, flats: Sequence[Tensor], low: int, high: int) -> list[Tensor]:
        """Return a part of flat tensors on the device of the sum."""
        return [flat[low:high].to(self.sum.device) for flat in flats]


def _prefixed(prefix: str, layout: Layout) -> Layout:
    names = {prefix + name: place for name, place in layout.slices.items()}
    return layout._replace(slices=names)


def _quotient(variance: Variance, divisor: float, span: slice, out: Tensor) -> Tensor:
    return torch.div(variance(span), divisor, out=out)


def _sample(
    average: Read,
    variance: Variance,
    scale: float,
    noise: Tensor,
    start: int,
    span: slice,
    out: Tensor,
) -> Tensor:
    """Write the average plus `scale` standard deviations times noise, which begins at `start`."""
    values = average(span, out)
    part = noise[span.start - start : span.stop - start].to(values.device)
    return values.addcmul_(variance(span).sqrt_(), part, value=scale)
