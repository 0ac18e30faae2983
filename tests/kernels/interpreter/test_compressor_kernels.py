"""How the compressor's kernels distribute tokens over programs."""

import pytest

pytest.importorskip("triton", reason="published for Linux only")


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("num_tokens", [1, 7, 133, 1057, 8192, 16411, 100_000])
def test_tokens_that_complete_a_window_are_of_different_programs(
    num_tokens: int, ratio: int
) -> None:
    """In a prefill, tokens that end windows are ``ratio`` apart; programs share them evenly."""
    from dsv4_ops.kernels.compressor import launch as kernels

    short = 2 * ratio <= kernels.SHORT_WINDOW
    if short:
        most = kernels.SHORT_TOKENS, kernels.SHORT_PROGRAMS
        programs = kernels.scanning_programs(num_tokens, *most)
    else:
        programs = kernels._long_programs(num_tokens)
    assert 1 <= programs <= num_tokens
    for first in (0, 1, ratio - 1):
        owners = [token % programs for token in range(first, num_tokens, ratio)]
        share = -(-len(owners) // programs)
        assert max((owners.count(program) for program in set(owners[:64])), default=0) <= share + 1


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 1), (8, 8), (128, 65), (1024, 51), (2048, 35), (2176, 33), (4096, 33), (8192, 65)],
)
def test_few_tokens_have_a_program_for_two_of_them(num_tokens: int, expected: int) -> None:
    """Few tokens may all end a long window. From 2176 tokens on, 33 programs or one per 128 run."""
    from dsv4_ops.kernels.compressor import launch as kernels

    assert kernels._long_programs(num_tokens) == expected


def test_states_that_are_saved_first_have_launches_before_the_fused_one() -> None:
    from dsv4_ops.cli import kernels

    names = {}
    for save_first in (False, True):
        tensors, settings = kernels.examples()["insert_c4_step"]
        settings = {**settings, "save_first": save_first}
        launches = kernels.recorded("insert_c4_step", tensors, settings)
        names[save_first] = [launch.kernel.__name__ for launch in launches]
        saved = [launches[-1].kwargs[name][0] for name in ("SAVE", "INDEXER_SAVE")]
        assert [tokens > 0 for tokens in saved] == [not save_first] * 2
    assert names[False] == ["insert_c4_step_kernel"]
    assert names[True] == ["save_compressor_states_kernel"] * 2 + names[False]
