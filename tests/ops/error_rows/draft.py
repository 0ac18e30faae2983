"""Rows of the verification of drafts, and a valid call."""

import torch

from tests.helpers import i64
from tests.ops.error_rows.valid import COUNTS, NUMBERS, OWN, Valid
from tests.ops.error_rows.wording import Entry, no_entry, no_float, of_shape, wrong

# two requests with one draft each, and a vocabulary of four tokens
OWN |= {
    "verify_draft": {
        "logits": Valid(torch.zeros(2, 2, 4), "[num_reqs, num_drafts + 1, vocab_size]",
         "torch.float32 or torch.bfloat16"),
        "draft_ids": Valid(i64([[0], [1]]), "[num_reqs, num_drafts]"),
        "draft_probs": Valid(torch.ones(2, 1, 4) / 4, "[num_reqs, num_drafts, vocab_size]"),
        "uniforms": Valid(torch.zeros(2, 2), "[num_reqs, num_drafts + 1]"),
    }
}  # fmt: skip
NUMBERS |= {"temperature": 1.0}
COUNTS |= {
    "num_drafts": "the drafted tokens of a request",
    "vocab_size": "the tokens of the vocabulary",
}
GREEDY = "Leave it out, or pass a temperature above 0"
RANDOM = "Pass torch.rand(num_reqs, num_drafts + 1), or temperature=0.0"


def greedy(name: str, **spoiled: object) -> Entry:
    must = "be None with temperature = 0"
    return wrong(name, must, "a tensor", GREEDY, temperature=0.0, **spoiled)


TABLE: dict[str, list[Entry]] = {
    "verify_draft": [
        of_shape("logits", "have a token in its vocabulary", torch.zeros(2, 2, 0),
         "Pass the logits of at least one"),
        no_entry("logits", "[num_reqs, num_drafts + 1, vocab_size]", torch.zeros(2, 0, 4)),
        no_float("temperature", "hot"),
        *[wrong("temperature", "be finite and at least 0", value, "Pass 0 to decode greedily")
         for value in (-1.0, float("nan"))],
        wrong("uniforms", "be a tensor with temperature = 1.0", None, RANDOM),
        greedy("draft_probs"),
        greedy("uniforms", draft_probs=None),
    ]
}  # fmt: skip
