"""A decode step as one CUDA graph: by torch.compile, and captured by hand.

The host never reads from the device: replays read tokens and lengths from tensors at fixed
addresses, and the host only launches the next replay. The step is captured twice: by
``mode="reduce-overhead"``, and by ``torch.cuda.graph`` around the compiled step. A setting makes
the former raise an error where torch would silently run no graph. Without a GPU the same loop runs
the compiled step, and the script prints that there is no graph.

    python examples/03_cuda_graph.py --device cuda
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from itertools import chain

# idle threads must not spin: they would take the core from the compiler
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from dsv4_ops.attention.caches import mark_static
from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.text import ByteTokenizer, real_text

ROWS, TOKENS = 6, 16  # requests and tokens of a step
LENGTHS = (3, 12, 7, 10)  # lengths of the prompts; the other two requests are padding


class Decoder:
    """Decoding requests, with the tensors of the step at fixed addresses."""

    def __init__(self, device: str) -> None:
        model = small_model(device=device)
        self.model = v4.patch(model, kv="fp32", precision="reference", batch_invariant=True)
        self.cache = v4.PagedCache.for_model(
            model, max_batch_size=ROWS, max_cache_len=512, max_chunk=TOKENS, num_blocks=len(LENGTHS)
        )
        text, self.prompts = real_text(sum(LENGTHS)), []
        for number, length in enumerate(LENGTHS):
            place = sum(LENGTHS[:number])
            self.prompts.append(ByteTokenizer().encode(text[place : place + length - 1], bos=True))
            self.cache.add(number, num_tokens=256)  # row 0, 1, ..
        padding = [0] * (ROWS - len(LENGTHS))
        one_each = [*range(len(LENGTHS) + 1), *(len(LENGTHS) for _ in padding)]
        rows = [*range(len(LENGTHS)), *(-1 for _ in padding)]
        self.grows = self.int32([1] * len(LENGTHS) + padding)
        self.batch = v4.StepBatch(
            torch.zeros(TOKENS, dtype=torch.int64, device=device),
            self.int32(one_each),
            self.int32([*LENGTHS, *padding]),
            self.int32(rows),
        )
        if device == "cuda":
            mark_static(*vars(self.batch).values())  # a graph reads these tensors in place

    def int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.cache.device)

    def decode(self, step: Callable[[], Tensor], steps: int) -> tuple[list[list[int]], float]:
        """Prefill, then run ``step`` ``steps`` times; return tokens and seconds per step."""
        starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS) + 1)]
        whole = torch.tensor([*chain(*self.prompts)], device=self.cache.device)
        lens, rows = self.int32([*LENGTHS]), self.int32([*range(len(LENGTHS))])
        prefill = v4.StepBatch(whole, self.int32(starts), lens, rows)
        tokens = [v4.prefill_step(self.model, prefill, self.cache.tensors).argmax(-1)]
        self.batch.seq_lens.copy_(torch.cat([lens, self.batch.seq_lens[len(LENGTHS) :]]))
        finish(self.cache.device)
        begun = time.perf_counter()
        for _ in range(steps):
            self.batch.tokens[: len(LENGTHS)] = tokens[-1]
            self.batch.seq_lens.add_(self.grows)
            tokens.append(step()[: len(LENGTHS)].argmax(-1))
        self.cache.raise_if_dropped()  # synchronises, which a step never does
        finish(self.cache.device)
        return torch.stack(tokens, 1).tolist(), (time.perf_counter() - begun) / steps

    def compiled(self, **settings: str) -> Callable[[], Tensor]:
        step = torch.compile(v4.decode_step, fullgraph=True, dynamic=False, **settings)
        return lambda: step(self.model, self.batch, self.cache.tensors, state_rings=False)

    def captured(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture ``step`` in a CUDA graph, after a warm-up on a side stream."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=bounded_int(1, 256 - max(LENGTHS)), default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    decoder, found = Decoder(args.device), {}
    print("eager", flush=True)
    found["eager"] = decoder.decode(
        lambda: v4.decode_step(decoder.model, decoder.batch, decoder.cache.tensors), args.steps
    )
    print("compiling: a minute or two, unless Inductor's cache has it", flush=True)
    step = decoder.compiled()
    decoder.decode(step, 3)
    found["compiled"] = decoder.decode(step, args.steps)
    if args.device == "cuda":
        print("capturing by hand, then by reduce-overhead", flush=True)
        replay = decoder.captured(step)
        found["CUDA graph by hand"] = decoder.decode(replay, args.steps)
        torch._dynamo.reset()
        with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
            reduced = decoder.compiled(mode="reduce-overhead")
            decoder.decode(reduced, 3)
            found["reduce-overhead"] = decoder.decode(reduced, args.steps)
    for name, (_, seconds) in found.items():
        print(f"  {name:20} {seconds * 1e3:8.2f} ms per step")
    wrong = [name for name, (tokens, _) in found.items() if tokens != found["eager"][0]]
    if wrong:
        print(f"FAILED: other tokens than eager: {', '.join(wrong)}")
        return 1
    what = "two CUDA graphs give" if args.device == "cuda" else "no GPU here: compiled gives"
    print(
        f"shown: {what} the tokens of the eager step, {args.steps} steps of {len(LENGTHS)} requests"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
