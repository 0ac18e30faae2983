"""Oracle of the verification of drafts, in plain Python."""

import math
import struct


def number(pattern: int, bf16: bool = False) -> float:
    """Return the value of a float32 or bfloat16 bit pattern."""
    return struct.unpack("<f", struct.pack("<I", pattern << 16 if bf16 else pattern))[0]


def logit(pattern: int, bf16: bool) -> float:
    value = number(pattern, bf16)
    return -math.inf if math.isnan(value) else min(value, 3.4028234663852886e38)


def share(pattern: int) -> float:
    value = number(pattern)
    return value if 0 < value < math.inf else 0.0


def uniform(pattern: int) -> float:
    value = number(pattern)
    return 0.0 if math.isnan(value) else min(max(value, 0.0), 1 - 2**-24)


def softmax(row: list[float], temperature: float) -> list[float]:
    top = max(row)
    if top == -math.inf:
        return [0.0] * len(row)
    weights = [math.exp((value - top) / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]


def pick(shares: list[float], at: float) -> int:
    """Pick a token by cumulative weights, which are multiples of 2^-38 of their sum."""
    weights = [round(value / sum(shares) * 2**38) if value else 0 for value in shares]
    for token in range(len(weights)):
        if sum(weights[: token + 1]) > at * sum(weights):
            return token
    return -1


def verify_request(rows, ids, shares, uniforms, temperature):
    """Return the tokens of a request, and the number of accepted drafts."""
    tokens: list[int] = []
    for place, row in enumerate(rows):
        drafted = place < len(ids) and 0 <= ids[place] < len(row)
        if uniforms is None:
            wanted = -1 if max(row) == -math.inf else row.index(max(row))
            keep = drafted and ids[place] == wanted
        else:
            p, q = softmax(row, temperature), [0.0] * len(row)
            if drafted:
                q = shares[place] if shares else [float(ids[place] == i) for i in range(len(row))]
            keep = drafted and uniforms[place] * q[ids[place]] < p[ids[place]]
            rest = [max(mine - other, 0.0) for mine, other in zip(p, q, strict=True)]
            wanted = pick(rest if sum(rest) > 0 else p, uniforms[-1])
        if not keep:
            return [*tokens, wanted], len(tokens)
        tokens.append(ids[place])
    raise AssertionError("the last row has no draft to keep")


def verify_draft(logits, draft_ids, draft_probs, uniforms, *, temperature, bf16_logits):
    found = []
    for request, patterns in enumerate(logits):
        rows = [[logit(value, bf16_logits) for value in row] for row in patterns]
        shares = None
        if draft_probs:
            shares = [[share(value) for value in row] for row in draft_probs[request]]
        chances = None if uniforms is None else [uniform(value) for value in uniforms[request]]
        kept, count = verify_request(rows, draft_ids[request], shares, chances, temperature)
        found.append((kept + [-1] * (len(rows) - len(kept)), count))
    return [tokens for tokens, _ in found], [count for _, count in found]
