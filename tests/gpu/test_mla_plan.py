"""Plans of sparse MLA for decode on a GPU: the kernels with a plan against the reference, ragged
batches, CUDA graphs, adversarial plans. Run there with ``pytest -m gpu tests``."""

import pytest
import torch

from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.support import attention_batches as batches
from tests.support.prefill_batches import adversarial_plan, plan_of, stale_plan, with_plan

both_ops = pytest.mark.parametrize("name", [batches.DECODE, batches.PAGED])


def ragged(name: str, seed: int, tokens: int, heads: int) -> Case:
    """Make tokens with 0 to 8192 compressed rows."""
    if name == batches.DECODE:
        return batches.decode_case(seed, tokens, heads, 8192)
    return batches.paged_case(seed, tokens, heads, columns=4096)


@both_ops
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_plans_of_ragged_batches(name: str, tokens: int, heads: int) -> None:
    """Plans for these or other lengths, for one program or thousands, change no result."""
    case = ragged(name, tokens, tokens, heads)
    batches.agrees(name, case)
    stale = stale_plan(case, 3), stale_plan(case, 4, 7)
    for plan in (plan_of(case), plan_of(case, 1), plan_of(case, 5000), *stale):
        batches.agrees(name, with_plan(case, plan))


@both_ops
@pytest.mark.parametrize("heads", [8, 64, 65, 128])
@pytest.mark.parametrize("tokens", [5, 64, 300])
def test_plans_of_batches(name: str, tokens: int, heads: int) -> None:
    case = batches.case_of(name, tokens, tokens, heads)
    for plan in (plan_of(case), stale_plan(case, 5)):
        batches.agrees(name, with_plan(case, plan))


@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (3, 128), (64, 8), (300, 64)])
def test_plans_of_a_window_only(tokens: int, heads: int) -> None:
    case = batches.decode_case(tokens, tokens, heads, None)
    for plan in (plan_of(case), stale_plan(case, 5)):
        batches.agrees(batches.DECODE, with_plan(case, plan))


@both_ops
def test_a_planned_call_has_the_same_bits_every_time(name: str) -> None:
    case = batches.case_of(name, 4, 40, 64)
    case = with_plan(case, stale_plan(case, 1))
    first = batches.kernel(name, case)
    for _ in range(5):
        assert all(map(equal, batches.kernel(name, case), first))


@both_ops
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [64, 128])
def test_adversarial_plans_spoil_only_their_own_tokens(name: str, heads: int, seed: int) -> None:
    """Rows of some tokens name absent tokens, splits or starts; other tokens keep their bits."""
    case = batches.case_of(name, seed, 40, heads)
    for plan in (plan_of(case), stale_plan(case, seed)):
        expected = batches.kernel(name, with_plan(case, plan))
        victims = torch.randperm(40, generator=batches.generator(seed))[:12]
        others = [token for token in range(40) if token not in victims.tolist()]
        for again in range(8):
            spoiled = adversarial_plan(plan, victims, 40, 10 * seed + again)
            actual = batches.kernel(name, with_plan(case, spoiled))
            torch.cuda.synchronize()
            for left, right in zip(actual, expected, strict=True):
                assert equal(left[others], right[others])


@both_ops
@pytest.mark.parametrize("seed", range(4))
def test_plans_with_partial_results_anywhere(name: str, seed: int) -> None:
    """Spoiled rows may overwrite only partial results of other tokens with several splits."""
    case = batches.case_of(name, seed, 40, 64)
    plan = stale_plan(case, seed)
    expected = batches.kernel(name, with_plan(case, plan))
    victims = torch.arange(0, 40, 3)
    several = plan[plan[:, 2] > 1, 0].tolist()
    alone = [t for t in range(40) if t not in {*victims.tolist(), *several}]
    assert alone
    for again in range(8):
        spoiled = adversarial_plan(plan, victims, 40, 10 * seed + again, anywhere=True)
        actual = batches.kernel(name, with_plan(case, spoiled))
        torch.cuda.synchronize()
        for left, right in zip(actual, expected, strict=True):
            assert equal(left[alone], right[alone])
