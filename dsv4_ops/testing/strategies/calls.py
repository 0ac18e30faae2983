"""Sample the contract's calls: the public function with bound settings, and its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.registry import OpSpec
from dsv4_ops.core.tiles import PLAN_COLUMNS
from dsv4_ops.testing.case import Case, OpTesting
from dsv4_ops.testing.strategies.draw import strategy_of

Results = tuple[Tensor, ...]

SAMPLES = 20
"""Number of sampled calls that the checks of one configuration share; to sample a call takes longer
than to run it."""
CHUNK = 200
"""Maximum calls that Hypothesis samples at a time."""


def op_testing(spec: OpSpec) -> OpTesting:
    """Return the named cases and the sampler of an op."""
    op_testing: OpTesting = spec.implementation("testing")
    return op_testing


def changed(spec: OpSpec, tensor: Tensor) -> Tensor:
    """Return different values for ``tensor`` that are valid for the op."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).flip(0).view(tensor.dtype)
    if "plan" in spec.parameters and tensor.shape[1:] == (PLAN_COLUMNS,):
        # one work tile per token, as in a plan of short lengths
        first = tensor[:, 1:2] == 0
        whole = torch.cat([tensor[:, :2], tensor[:, 1:2] + 1, tensor[:, :1] * 0], 1)
        return torch.where(first, whole, torch.full_like(tensor, -1))
    if "slot_mapping" in spec.parameters or tensor.is_floating_point():  # keeps slots distinct
        return tensor.flip(0)
    return torch.div(tensor * 2, 3, rounding_mode="floor")  # keeps query_start_loc non-decreasing


def stays_determined(spec: OpSpec, case: Case) -> bool:
    """Whether a call keeps a unique outcome when its values change."""
    return op_testing(spec).determined(case.copy(functools.partial(changed, spec)))


def as_case(spec: OpSpec, settings: dict[str, Any], tensors: Sequence[Tensor]) -> Case:
    """Return the case in which the bound public function calls the op with copies of
    ``tensors``."""
    capacities = dict.fromkeys(sizes(spec.schema), tensors[-1].shape[0])
    inputs = tensors[: len(tensors) - len(capacities)]
    return Case("called", tuple(inputs), {**settings, **capacities}).copy()


def reference(spec: OpSpec, case: Case) -> Results:
    """Run the reference on ``case``, on the device of its tensors."""
    return case.run(spec.reference, spec.mutated)


def sizes(schema: str) -> list[str]:
    """Return the names of the keyword arguments that are capacities. A capacity sets the size of a
    result."""
    return [name for name in ("num_tokens", "num_rows") if f"SymInt {name}" in schema]


def with_sizes(spec: OpSpec, settings: dict[str, Any]) -> Callable[..., Any]:
    """Bind ``settings`` to the public function.

    The bound function takes a capacity as the length of an extra tensor.
    """
    public, capacities = spec.implementation("ops"), sizes(spec.schema)
    if not capacities:
        return lambda *tensors: public(*tensors, **settings)
    (size,) = capacities
    return lambda *tensors: public(*tensors[:-1], **settings, **{size: tensors[-1].shape[0]})


def sized_tensors(case: Case) -> tuple[Tensor, ...]:
    """Return the tensors of a case, and a tensor for the capacity if the op has a capacity."""
    tensors = tuple(tensor for tensor in case.tensors if tensor is not None)
    capacities = [
        case.settings[name] for name in ("num_tokens", "num_rows") if name in case.settings
    ]
    device = tensors[0].device
    return (*tensors, *(torch.empty(size, dtype=torch.uint8, device=device) for size in capacities))


def samples(
    op_testing: OpTesting, settings: dict[str, Any], count: int, *, derandomize: bool = True
) -> Iterator[Case]:
    """Sample ``count`` calls of one configuration. With ``derandomize``, every process gets the
    same calls.

    A caller must copy a tensor before it writes to the tensor.
    """
    configuration = tuple(sorted(settings.items()))
    if derandomize:
        yield from _shared(op_testing.make, configuration, max(count, SAMPLES))[:count]
        return
    for start in range(0, count, CHUNK):
        chunk = min(CHUNK, count - start)
        yield from _sample(op_testing.make, configuration, chunk, derandomize)


@functools.cache
def _shared(
    make: Callable[..., Case], configuration: tuple[tuple[str, Any], ...], count: int
) -> tuple[Case, ...]:
    return _sample(make, configuration, count, True)


def _sample(
    make: Callable[..., Case],
    configuration: tuple[tuple[str, Any], ...],
    count: int,
    derandomize: bool,
) -> tuple[Case, ...]:
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings as profile

    sampled: list[Case] = []

    @profile(
        max_examples=count,
        database=None,
        derandomize=derandomize,
        deadline=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy_of(lambda draw: make(draw, dict(configuration), 2)))
    def collect(case: Case) -> None:
        sampled.append(case)

    collect()
    # Hypothesis ends early if there are few different calls
    return tuple(islice(cycle(sampled), count))


def primer(
    op_testing: OpTesting,
    settings: dict[str, Any],
    *,
    skip: int = 0,
    keep: Callable[[Case], bool] | None = None,
) -> Case:
    """Sample a call that ``keep`` accepts, with as many distinct sizes as possible.

    torch.export would give equal sizes the same symbol.
    """

    def differing(case: Case) -> int:
        return len({size for tensor in sized_tensors(case) for size in tensor.shape})

    sampled = samples(op_testing, settings, SAMPLES)
    best_first = sorted(sampled, key=differing, reverse=True)
    accepted = (case for case in best_first if keep is None or keep(case))
    return next(islice(accepted, skip, None))
