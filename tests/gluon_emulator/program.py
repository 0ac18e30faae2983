"""One program of an emulated Gluon kernel: partitions that run in a random order, mbarriers, shared
memory, and matrix products that are computed when a partition waits for them.

Partitions run one at a time, so a seed determines the schedule. The emulator also finds errors that
this schedule does not show. Every partition has a vector clock, and barriers pass clocks on. If two
accesses to the same bytes of shared memory conflict, the clocks must order them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from tests.gluon_emulator.barriers import MOST, Barrier
from tests.gluon_emulator.memory import load, poison
from tests.gluon_emulator.values import EmulationError, Typed, Value, from_bits, storage

THREADS = 128
"""Number of threads in a partition."""


class _Stopped(BaseException):
    """Stops a partition after another partition has failed."""


@dataclass
class Partition:
    number: int
    clock: np.ndarray
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    goes_on: Callable[[], bool] | None = None
    waits_for: str = ""
    products: list[Product] = field(default_factory=list)
    """Products for which no partition has waited yet."""
    copies: list[tuple[Shared, Value]] = field(default_factory=list)
    """Copies whose arrival is not known yet."""
    groups: list[int] = field(default_factory=list)
    """Numbers of copies at which groups end."""


@dataclass
class _Access:
    time: float
    """Time on the partition's clock; inf while a product or a copy is in flight."""
    fences: dict[int, float] = field(default_factory=dict)
    """Partitions that had a fence after this access, and the time of their first fence."""


class _Memory:
    """An allocation, and each partition's last access of every kind to every part."""

    def __init__(self, program: Program, name: str) -> None:
        self.program, self.name = program, name
        self.accesses: dict[tuple[int, str, tuple[tuple[int, int], ...]], _Access] = {}


class Shared(Typed):
    """A view of shared memory. ``box`` has the view's range in every dimension of the allocation,
    in values, or in bytes for the last; ``axes`` has the dimension and unit of the view's axes."""

    def __init__(
        self,
        memory: _Memory,
        bits: np.ndarray,
        dtype: Any,
        box: tuple[tuple[int, int], ...],
        axes: tuple[tuple[int, int], ...],
    ) -> None:
        self.memory, self.bits, self.dtype, self.box, self.axes = memory, bits, dtype, box, axes

    @property
    def shape(self) -> list[int]:
        return list(self.bits.shape)

    def _part(self, dim: int, start: int, length: int) -> tuple[tuple[int, int], ...]:
        if not 0 <= start <= start + length <= self.bits.shape[dim]:
            what = f"{start}..{start + length} of {self.shape} of {self.memory.name}"
            raise EmulationError(f"shared memory out of bounds: {what}")
        axis, unit = self.axes[dim]
        box, first = list(self.box), self.box[axis][0]
        box[axis] = (first + start * unit, first + (start + length) * unit)
        return tuple(box)

    def index(self, place: Any) -> Shared:
        place = int(place)
        box = self._part(0, place, 1)
        return Shared(self.memory, self.bits[place], self.dtype, box, self.axes[1:])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        start, length = int(start), int(length)
        box = self._part(dim, start, length)
        places = (slice(None),) * dim + (slice(start, start + length),)
        return Shared(self.memory, self.bits[places], self.dtype, box, self.axes)

    def load(self, layout: Any = None) -> Value:
        return self.memory.program.load(self)

    def store(self, value: Value) -> None:
        self.memory.program.store(self, value)

    def permute(self, order: Any) -> Shared:
        axes = tuple(self.axes[dim] for dim in order)
        return Shared(self.memory, self.bits.transpose(order), self.dtype, self.box, axes)

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        """Return a view of the same bytes, row by row, with another type and shape."""
        bits = self.bits.view(storage(dtype))
        assert list(bits.shape) == list(shape)
        assert self.axes[-1][0] == len(self.box) - 1
        axes = (*self.axes[:-1], (self.axes[-1][0], bits.itemsize))
        return Shared(self.memory, bits, dtype, self.box, axes)


@dataclass
class Product:
    """A matrix product that is not computed yet."""

    left: Value | Shared
    right: Shared
    sums: Value | Product
    use_sums: bool
    result: Value | None = None

    @property
    def shape(self) -> list[int]:
        return self.sums.shape

    @property
    def outcome(self) -> Value | Product:
        return self if self.result is None else self.result

    @property
    def operands(self) -> list[Shared]:
        return [part for part in (self.left, self.right) if isinstance(part, Shared)]

    def take_place(self) -> None:
        sums = self.sums.result if isinstance(self.sums, Product) else self.sums
        if sums is None:
            raise EmulationError("a product begins with sums that nobody waited for")
        left, right = (
            part if isinstance(part, Value) else from_bits(part.bits, part.dtype)
            for part in (self.left, self.right)
        )
        # 16 at a time, as the tensor cores do; numpy starts no threads for so few
        rows, inner = left.data.shape
        columns = left.data.astype(np.float32).reshape(rows, inner // 16, 16).swapaxes(0, 1)
        with np.errstate(all="ignore"):
            product = (columns @ right.data.astype(np.float32).reshape(inner // 16, 16, -1)).sum(0)
            self.result = sums.like(sums.data + product if self.use_sums else product)


def _checked(left: Any, right: Any, sums: Any) -> None:
    rows, inner = left.shape
    fits = right.shape[0] == inner and sums.shape == [rows, right.shape[1]]
    kinds = left.dtype == right.dtype and left.dtype in (gl.bfloat16, gl.float16)
    if not (fits and kinds and rows % 64 == 0 and inner % 16 == 0 and right.shape[1] % 8 == 0):
        raise EmulationError(f"no such product: {left.shape} {right.shape} {sums.shape}")


class Program:
    """The running program of a grid."""

    def __init__(self, grid: tuple[int, ...], random: Random) -> None:
        self.grid, self.random = grid, random

    def begin(self, ids: tuple[int, ...]) -> None:
        """Start the program with these ids in the grid."""
        self.ids = ids
        self.running = Partition(0, np.zeros(MOST))
        self.live = [self.running]
        self.failure: BaseException | None = None
        self.memories: list[_Memory] = []
        self.barriers: dict[tuple[_Memory, Any], Barrier] = {}

    def switch(self, waits_for: str = "", goes_on: Callable[[], bool] | None = None) -> None:
        """Let a random partition continue; with ``goes_on``, this one waits until that is true."""
        me = self.running
        me.waits_for, me.goes_on = waits_for, goes_on
        if goes_on is None and self.random.random() < 0.5:
            return
        self._hand_over(me)
        if self.failure is not None:
            raise _Stopped

    def _hand_over(self, me: Partition | None) -> None:
        ready = [part for part in self.live if part.goes_on is None or part.goes_on()]
        if not ready:
            waits = (f"partition {part.number} waits for {part.waits_for}" for part in self.live)
            raise EmulationError(f"deadlock: {'; '.join(waits)}")
        self.running = self.random.choice(ready)
        if self.running is not me:
            self.running.turn.release()
            if me is not None:
                me.turn.acquire()

    def specialise(self, parts: Any, warps: Any, registers: Any) -> Any:
        """Run the first function in this partition, and the others in new partitions."""
        assert len(parts) == len(warps) + 1 == len(registers) + 1 <= MOST
        assert len(self.live) == 1
        me = self.running
        me.clock[0] += 1
        beside = [Partition(number, me.clock.copy()) for number in range(1, len(parts))]
        threads = [
            threading.Thread(target=self._beside, args=(partition, *part), daemon=True)
            for partition, part in zip(beside, parts[1:], strict=True)
        ]
        self.live += beside
        for thread in threads:
            thread.start()
        try:
            result = parts[0][0](*parts[0][1])
            self.switch("the other partitions", lambda: len(self.live) == 1)
        except BaseException as error:
            self._fail(error)
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        for partition in beside:
            me.clock = np.maximum(me.clock, partition.clock)
        return result

    def _beside(self, me: Partition, function: Any, args: Any) -> None:
        me.turn.acquire()
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):  # holds for this thread only
                    function(*args)
                self.finish(me)
                self.live.remove(me)
                self._hand_over(None)
        except BaseException as error:
            self._fail(error)

    def finish(self, me: Partition) -> None:
        if me.products or me.copies:
            what = "products" if me.products else "copies"
            raise EmulationError(f"partition {me.number} does not wait for its {what}")

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            for part in self.live:
                if part is not self.running:
                    part.turn.release()

    def init(self, bar: Shared, count: int) -> None:
        self.barriers[bar.memory, bar.box] = Barrier(int(count))

    def _barrier(self, bar: Shared) -> Barrier:
        barrier = self.barriers.get((bar.memory, bar.box))
        if barrier is None:
            raise EmulationError(f"{bar.memory.name} at {bar.box} is no barrier")
        return barrier

    def arrive(self, bar: Shared, *, count: int = 1, pred: Any = True) -> None:
        self.switch()
        if not pred:
            return
        me, barrier = self.running, self._barrier(bar)
        barrier.arrive(me.number, me.clock, int(count), f"{bar.memory.name} {bar.box}")
        me.clock[me.number] += 1

    def wait(self, bar: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if not pred:
            return
        me, barrier, parity = self.running, self._barrier(bar), int(phase)
        if parity not in (0, 1):
            raise EmulationError(f"phase {parity} of a barrier")
        place = [first for first, _ in bar.box[:-1]]
        where = f"phase {parity} of barrier {bar.memory.name} {place}"
        self.switch(where, lambda: barrier.phase & 1 != parity)
        me.clock = np.maximum(me.clock, barrier.clock)
        me.clock[me.number] += 1
        barrier.seen[me.number] = me.clock[me.number]

    def allocate(self, dtype: Any, shape: Any, layout: Any, value: Value | None = None) -> Shared:
        memory = _Memory(self, f"{len(self.memories)}: {dtype}{list(shape)}")
        self.memories.append(memory)
        bits = np.full(tuple(shape), poison(dtype), storage(dtype))
        size = bits.itemsize
        box = (*((0, extent) for extent in shape[:-1]), (0, shape[-1] * size))
        axes = tuple((dim, 1) for dim in range(len(shape) - 1))
        made = Shared(memory, bits, dtype, box, (*axes, (len(shape) - 1, size)))
        if value is not None:
            self.store(made, value)
        return made

    def touch(self, part: Shared, kind: str) -> _Access:
        """Record a "read", a "write", or the read of a "product"; raise if no barrier orders the
        access with an earlier conflicting access."""
        me = self.running
        me.clock[me.number] += 1
        accesses = part.memory.accesses
        for (number, other, box), access in accesses.items():
            if "write" not in (kind, other) or not _overlap(box, part.box):
                continue
            own = number == me.number and access.time < math.inf
            what = f"{kind} by partition {me.number} and {other} by {number}"
            if not own and access.time > me.clock[number]:
                raise EmulationError(f"race: {what} of {part.memory.name} {part.box}")
            fenced = any(time <= me.clock[by] for by, time in access.fences.items())
            if kind == "product" and not fenced:
                raise EmulationError(f"no fence: {what} of {part.memory.name} {part.box}")
        access = accesses[me.number, kind, part.box] = _Access(me.clock[me.number])
        return access

    def fence(self, cluster: bool = False) -> None:
        me = self.running
        me.clock[me.number] += 1
        for memory in self.memories:
            for (number, kind, _), access in memory.accesses.items():
                if kind == "write" and access.time <= me.clock[number]:
                    access.fences.setdefault(me.number, me.clock[me.number])

    def load(self, part: Shared) -> Value:
        self.switch()
        self.touch(part, "read")
        return from_bits(part.bits.copy(), part.dtype)

    def store(self, part: Shared, value: Value) -> None:
        self.switch()
        if value.shape != part.shape or value.dtype != part.dtype:
            raise EmulationError(f"{value.dtype}{value.shape} in {part.dtype}{part.shape}")
        self.touch(part, "write")
        part.bits[...] = value.bits()

    def copy(self, part: Shared, pointer: Value, mask: Any = None) -> None:
        """Start copies: memory is read now, and data arrives later. Masked values are zero."""
        self.switch()
        self.touch(part, "write").time = math.inf
        self.running.copies.append((part, load(pointer, mask, 0)))

    def copies_arrive(self, bar: Shared, increment_count: bool = True) -> None:
        """Let every thread arrive at a barrier when all its copies so far have arrived."""
        self.switch()
        assert not increment_count
        self._arrived(len(self.running.copies))
        self.arrive(bar, count=THREADS)

    def commit_copies(self) -> None:
        """Put all copies since the last group into a new group."""
        self.running.groups.append(len(self.running.copies))

    def wait_copies(self, outstanding: int = 0) -> None:
        """Wait for all groups but the last ``outstanding``."""
        self.switch()
        groups = self.running.groups
        done = groups[: max(len(groups) - int(outstanding), 0)]
        self._arrived(done[-1] if done else 0)

    def _arrived(self, count: int) -> None:
        me = self.running
        for part, value in me.copies[:count]:
            del part.memory.accesses[me.number, "write", part.box]
            self.touch(part, "write")
            part.bits[...] = value.bits()
        del me.copies[:count]
        me.groups = [end - count for end in me.groups if end > count]

    def product(
        self, left: Any, right: Any, sums: Any, *, use_acc: Any = True, is_async: bool = False
    ) -> Any:
        self.switch()
        _checked(left, right, sums)
        product = Product(left, right, sums, bool(use_acc))
        self.running.products.append(product)
        for operand in product.operands:
            self.touch(operand, "product").time = math.inf
        return product if is_async else self.wait_products(0, (product,))

    def wait_products(self, outstanding: Any = 0, deps: Any = ()) -> Any:
        self.switch()
        waiting = self.running.products
        while len(waiting) > int(outstanding):
            product = waiting.pop(0)
            product.take_place()
            for operand in product.operands:
                self.touch(operand, "product")
        for under_way in waiting:
            for operand in under_way.operands:
                access = operand.memory.accesses[self.running.number, "product", operand.box]
                access.time = math.inf
        results = tuple(dep.outcome if isinstance(dep, Product) else dep for dep in deps)
        return results[0] if len(results) == 1 else results


def _overlap(left: Any, right: Any) -> bool:
    pairs = zip(left, right, strict=True)
    return all(one[0] < other[1] and other[0] < one[1] for one, other in pairs)
