"""Uses of a ``PagedCache`` that once silently gave wrong logits: now they are right, or refused
before anything is written, or counted where the host cannot read values."""

import re

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.steps import padded, step as step_module
from dsv4_ops.testing.models import small_mla_model
from tests.helpers import i32
from tests.support.hf_models import expected, new_cache, reference, refuses, text

CLOSE = 1e-4  # logits have a standard deviation of one


@pytest.fixture
def unread(monkeypatch):
    """Run steps as in a graph or on a GPU, where nothing reads values on the host."""
    monkeypatch.setattr(step_module, "values_are_free", lambda *tensors: False)
    monkeypatch.setattr(padded, "may_wait", lambda tensor: False)


def spread(width, *places):
    """Return ids and a mask of ``width`` columns, with each request's tokens at its ``places``."""
    ids = torch.full((len(places), width), 99)
    mask = torch.zeros(len(places), width, dtype=torch.int64)
    for row, columns in enumerate(places):
        ids[row, columns] = text()[row, : len(columns)]
        mask[row, columns] = 1
    return ids, mask


def check_rows(logits, places, done=None):
    for row, columns in enumerate(places):
        start = 0 if done is None else done[row]
        want = expected()[row, start : start + len(columns)]
        torch.testing.assert_close(logits[row, columns], want, rtol=0, atol=CLOSE)


def test_padding_among_tokens():
    """Padding interrupts windows of 4 and of 128 tokens."""
    places = [
        [column for column in range(150) if column not in (5, 7, 140)],
        list(range(0, 150, 2)),
        [column for column in range(150) if column != 127],
    ]
    ids, mask = spread(150, *places)
    cache = new_cache()
    check_rows(reference()(ids, attention_mask=mask, cache=cache).logits, places)
    assert cache.seq_lens.tolist() == [147, 75, 149]


def test_padding_in_embeddings_and_negative_positions():
    places = [[0, 1, 4, 5, 6, 9], [1, 2, 3, 4, 5, 6, 7, 8]]
    ids, mask = spread(10, *places)
    model = reference()
    positions = torch.where(mask > 0, mask.cumsum(1) - 1, -1)
    logits = model(ids, position_ids=positions, cache=new_cache()).logits
    check_rows(logits, places)
    given = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
    logits = model.model(input_ids=ids, cache=new_cache(), **given).last_hidden_state
    check_rows(model.lm_head(logits), places)


def test_positions_with_a_gap_are_refused():
    cache = new_cache(max_batch_size=1)
    reference()(text()[2:, :40], cache=cache)
    cache.reset()  # rows of another owner stay
    model = reference()
    model(text()[:1, :10], cache=cache)
    for positions in ([20, 21], [10, 12], [10, 9], [11, 12]):
        given = {"position_ids": torch.tensor([positions]), "cache": cache}
        with refuses(cache, r"model: position_ids must follow .*10 of row 0.*got"):
            model(text()[:1, 10:12], **given)
    logits = model(text()[:1, 10:12], position_ids=torch.tensor([[10, 11]]), cache=cache).logits
    torch.testing.assert_close(logits, expected()[:1, 10:12], rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("back", "held"), [(1, True), (2, True), (5, False), (200, False)])
def test_positions_that_go_back(back, held):
    """Positions go back as far as the rings of states reach; a request may start again."""
    model, cache, end = reference(), new_cache(max_batch_size=1, max_chunk=64), 250
    for start in range(0, end, 50):
        model(text()[:1, start : start + 50], cache=cache)
    first = end - back
    given = {"position_ids": torch.arange(first, first + 3)[None], "cache": cache}
    if held:
        logits = model(text()[:1, first : first + 3], **given).logits
        torch.testing.assert_close(logits, expected()[:1, first : first + 3], rtol=0, atol=CLOSE)
    else:
        with pytest.raises(ValueError, match="go back to a position whose states are still there"):
            model(text()[:1, first : first + 3], **given)
    begun = model(text()[:1, :9], position_ids=torch.arange(9)[None], cache=cache).logits
    torch.testing.assert_close(begun, expected()[:1, :9], rtol=0, atol=CLOSE)
    logits = model(text()[:1, 9:12], cache=cache).logits
    torch.testing.assert_close(logits, expected()[:1, 9:12], rtol=0, atol=CLOSE)


@pytest.mark.usefixtures("unread")
def test_a_graph_drops_and_counts_positions_behind_a_gap():
    model, cache = reference(), new_cache(max_batch_size=2)
    model(text()[:2, :10], cache=cache)
    positions = torch.tensor([[10, 12, 13], [10, 11, 12]])
    logits = model(text()[:2, 10:13], position_ids=positions, cache=cache).logits
    torch.testing.assert_close(logits[1], expected()[1, 10:13], rtol=0, atol=CLOSE)
    torch.testing.assert_close(logits[0, 0], expected()[0, 10], rtol=0, atol=CLOSE)
    assert cache.seq_lens.tolist() == [11, 13]
    with pytest.raises(RuntimeError, match="got 2 dropped"):
        cache.raise_if_dropped()
    cache.raise_if_dropped()
    logits = model(text()[:1, 11:14], cache=cache).logits
    torch.testing.assert_close(logits, expected()[:1, 11:14], rtol=0, atol=CLOSE)


def batch_of(tokens, starts, lens, rows):
    return v4.StepBatch(torch.as_tensor(tokens), i32(starts), i32(lens), i32(rows))


def pooled(**sizes):
    cache = new_cache(**{"max_cache_len": 270, "num_blocks": 3, "max_chunk": 64, **sizes})
    for request in range(3):
        cache.add(request, 200)
    cache.seq_lens.copy_(i32([270, 260, 20]))  # as if other code had filled the rows
    return cache


BATCHES = {
    "past max_cache_len": (([1, 2], [0, 1, 2], [10, 271], [0, 1]), 1,
     "batch.seq_lens must be at most max_cache_len of the cache = 270, got 271 of request 1. "),
    "a block that is not reserved": (([1, 2, 3, 4], [0, 1, 4], [10, 258], [0, 1]), 2,
     "batch.seq_lens must have blocks for all tokens of row 1, got 258 of request 1. Call res"),
    "two requests on one row": (([1, 2, 3, 4], [0, 1, 3, 4], [10, 11, 12], [0, 2, 2]), 1,
     "batch.rows must have a row of its own for every request, got row 2 for requests 1 and 2."),
    "a row past the cache": (([1, 2, 3], [0, 1, 3], [10, 11], [0, 3]), 2,
     "batch.rows must be below max_batch_size of the cache = 3, got row 3 for request 1. Pass"),
    "starts that end behind the tokens": (([1, 2], [0, 1, 5], [10, 11], [0, 1]), 3,
     "batch.query_start_loc must end at the 2 of batch.tokens, or before its padding, got 5. "),
    "starts that decrease": (([1, 2, 3, 4], [0, 4, 3], [10, 11], [0, 1]), 1,
     "batch.query_start_loc must not decrease, got 3 after 4. Pass the first token of every"),
    "starts that do not begin at 0": (([1, 2], [1, 1, 2], [10, 11], [0, 1]), 0,
     "batch.query_start_loc must begin with 0, got 1."),
    "lengths without the step": (([1, 2, 3], [0, 1, 3], [10, 1], [0, 1]), 1,
     "batch.seq_lens must count the 2 tokens that request 1 has in the step, got 1. Pass the"),
    "a gap": (([1, 2, 3], [0, 1, 3], [10, 23], [0, 2]), 2,
     "batch.seq_lens must let every request begin at most where its row ends, got request 1 "),
    "an id outside the vocabulary": (([1, 260], [0, 1, 2], [10, 11], [0, 1]), 1,
     "batch.tokens must be in 0..259, the vocabulary of the model, got 260. Pass ids of the"),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name", ["decode_step", "prefill_step"])
def test_batches_that_do_not_fit_are_refused(case, name):
    parts, _, message = BATCHES[case]
    cache = pooled()
    with refuses(cache, re.escape(f"{name}: {message}")):
        getattr(v4, name)(reference(), batch_of(*parts), cache)


def test_a_chunk_that_is_too_long_is_refused():
    cache = new_cache(max_chunk=64)
    most = 65  # four blocks, one of them shared by a window of 128 (less one) and the chunk
    batch = batch_of([1] * (most + 1), [0, most + 1], [most + 1], [0])
    with pytest.raises(ValueError, match="at most max_chunk tokens in a step, here 65, got 66"):
        v4.prefill_step(reference(), batch, cache)


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.usefixtures("unread")
def test_graphs_count_what_they_drop(case):
    """Other requests and their caches do not change."""
    parts, count, _ = BATCHES[case]
    wanted = v4.decode_step(reference(), batch_of([1], [0, 1], [10], [0]), pooled())
    cache = pooled()
    logits = v4.decode_step(reference(), batch_of(*parts), cache)
    assert logits.isfinite().all()
    dropped = int(cache.tensors.dropped)
    if case.startswith("starts that d"):  # the request of a token is undefined
        assert dropped >= count
        return
    assert dropped == count
    torch.testing.assert_close(logits[0], wanted[0], rtol=0, atol=CLOSE)
    if case == "two requests on one row":
        other = batch_of([1, 2, 3], [0, 1, 3], [10, 11], [0, 2])
        wanted = v4.decode_step(reference(), other, pooled())
        torch.testing.assert_close(logits[:3], wanted, rtol=0, atol=CLOSE)


def test_calls_that_do_not_fit_are_refused():
    model, cache = reference(), pooled()
    length = "sequence_length must lead to at most max_cache_len of the cache = 270 "
    for start, ids, message in (
        (230, text()[:, :50], length),
        (230, text()[:, :30], "cache must have blocks for all tokens, got 260 in row 0"),
        (0, torch.full((1, 3), 260), "input_ids must be in 0..259, the vocabulary of the model, "),
        (0, torch.full((1, 3), -1), "input_ids must be in 0..259, the vocabulary of the model, "),
    ):
        cache.seq_lens.fill_(start)
        with refuses(cache, f"model: {message}"):
            model(ids, cache=cache)


@pytest.mark.usefixtures("unread")
def test_graphs_of_calls_count_too():
    step = reference()
    cache = new_cache(max_cache_len=12)
    for start in range(0, 15, 5):
        step(text()[:, start : start + 5], cache=cache)
    assert cache.seq_lens.tolist() == [12] * 3
    assert int(cache.tensors.dropped) == 9
    cache = new_cache(max_cache_len=12)
    assert step(torch.full((1, 2), 2**40), cache=cache).logits.isfinite().all()
    assert int(cache.tensors.dropped) == 2


STEPS = {"V4": reference, "V3": lambda: v4.patch(small_mla_model(), kv="fp32")}


@pytest.mark.parametrize("step", [v4.decode_step, v4.prefill_step])
@pytest.mark.parametrize("family", STEPS)
def test_a_gap_is_counted_without_a_look_at_values(family, step, monkeypatch):
    """Tensors alone show it: no step reads rows that its request did not write."""
    model = STEPS[family]()
    caches = [new_cache(model, max_batch_size=2) for _ in range(2)]
    whole, gapped = (cache.tensors for cache in caches)
    for cache in (whole, gapped):
        step(model, batch_of([1, 2, 3, 4], [0, 3, 4], [3, 1], [0, 1]), cache)
        assert cache.seq_lens.tolist() == [3, 1]
    monkeypatch.setattr(step_module, "values_are_free", lambda *tensors: False)
    want = step(model, batch_of([5, 7], [0, 1, 2], [4, 0], [0, -1]), whole)
    got = step(model, batch_of([5, 6, 7], [0, 1, 3], [4, 4], [0, 1]), gapped)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=CLOSE)
    assert got.isfinite().all()
    assert int(gapped.dropped) == 2
    assert gapped.seq_lens.tolist() == [4, 1]
    for ours, other in zip(tree_leaves(gapped.layers), tree_leaves(whole.layers), strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=CLOSE)
    # the count grows until the request continues at or before the end of its row
    step(model, batch_of([8], [0, 1], [5], [1]), gapped)
    assert int(gapped.dropped) == 3
    step(model, batch_of([6, 7, 8], [0, 3], [4], [1]), gapped)
    step(model, batch_of([7, 8], [0, 2], [4], [1]), gapped)
    assert int(gapped.dropped) == 3
    assert gapped.seq_lens.tolist() == [4, 4]


def test_a_step_takes_the_cache_itself():
    batch = batch_of(text()[0, :3].tolist(), [0, 3], [3], [0])
    for name, want in (("decode_step", expected()[0, :3]), ("prefill_step", expected()[0, 2:3])):
        cache = new_cache()
        logits = getattr(v4, name)(reference(), batch, cache)
        torch.testing.assert_close(logits, want, rtol=0, atol=CLOSE)
        with pytest.raises(TypeError, match=f"{name}: cache must be a PagedCache, got NoneType"):
            getattr(v4, name)(reference(), batch, None)
        with pytest.raises(TypeError, match=f"{name}: batch must be a StepBatch, got tuple"):
            getattr(v4, name)(reference(), tuple(vars(batch).values()), cache)
        elsewhere = v4.StepBatch(*(value.to("meta") for value in vars(batch).values()))
        with pytest.raises(ValueError, match=f"{name}: batch.tokens must be on cpu like the cache"):
            getattr(v4, name)(reference(), elsewhere, cache)
    with pytest.raises(TypeError, match=r"^decode_step: state_rings must be a bool, got int"):
        v4.decode_step(reference(), batch, cache, state_rings=1)


def test_steps_without_tokens():
    cache = new_cache()
    batch = batch_of([], [0, 0], [0], [-1])
    batch = v4.StepBatch(batch.tokens.long(), *list(vars(batch).values())[1:])
    assert v4.decode_step(reference(), batch, cache).shape == (0, 260)
    assert v4.prefill_step(reference(), batch, cache).shape == (1, 260)
    assert not any(bool(leaf.any()) for leaf in tree_leaves(cache.tensors.layers))


def test_a_cache_is_made_of_a_configuration():
    with pytest.raises(TypeError, match=r"^PagedCache: config must be a configuration, got Deeps"):
        v4.PagedCache(reference(), max_batch_size=1, max_cache_len=8)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
    ],
)
def test_what_hugging_faces_caches_do_and_ours_does_not(call):
    with pytest.raises(NotImplementedError, match="must be of another cache, got a PagedCache"):
        call(new_cache())


def one(tokens, end):
    """Return a step of row 0."""
    return v4.StepBatch(tokens, i32([0, len(tokens)]), i32([end]), i32([0]))


def test_a_row_that_begins_again_in_a_step_may_go_back_in_a_call():
    """The length that the row's earlier request reached does not matter."""
    model, cache = reference(), new_cache(next_n=3, max_chunk=64)
    for start in range(0, 192, 64):
        model(text()[:1, start : start + 64], cache=cache)
    assert cache.written[0] == 192
    v4.prefill_step(model, one(text()[1, :60], 60), cache)
    v4.decode_step(model, one(text()[1, 60:63], 63), cache)
    assert (int(cache.seq_lens[0]), int(cache.written[0])) == (63, 63)
    logits = model(text()[1:2, 61:62], position_ids=torch.tensor([[61]]), cache=cache).logits
    torch.testing.assert_close(logits[0, 0], expected()[1, 61], rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("end", "back", "position"), [(250, 3, 239), (224, 5, 211)])
def test_what_steps_overwrote_no_call_reads(end, back, position):
    """Steps reached ``end`` and went back by some tokens: earlier states are overwritten."""
    model, cache = reference(), new_cache(next_n=8, max_chunk=64)
    for start in range(0, end, 50):
        stop = min(start + 50, end)
        v4.prefill_step(model, one(text()[0, start:stop], stop), cache)
    first = end - back
    v4.decode_step(model, one(text()[0, first : first + 1], first + 1), cache)
    assert (int(cache.seq_lens[0]), int(cache.written[0])) == (first + 1, end)
    at = torch.tensor([[position]])
    with pytest.raises(ValueError, match="must go back to a position whose states are still there"):
        model(text()[:1, position : position + 1], position_ids=at, cache=cache)
