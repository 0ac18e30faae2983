"""A byte-level tokenizer, and English text from the standard library."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import inspect
import io
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 260
"""256 bytes, three special tokens, and one unused token that makes the size even."""

_MODULES = ("argparse", "textwrap", "difflib", "decimal", "logging", "pickle", "random")
"""Standard library modules with long docstrings, in reading order."""


class ByteTokenizer:
    """One token per UTF-8 byte, plus BOS, EOS and PAD.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("one", bos=True)
    [256, 111, 110, 101]
    >>> tokenizer.decode([256, 111, 110, 101, 257])
    'one'
    """

    vocab_size = VOCAB_SIZE
    bos_token_id, eos_token_id, pad_token_id = BOS, EOS, PAD

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Return the tokens of ``text``, with BOS first if ``bos``."""
        return [BOS] * bos + list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens`` without special tokens; invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: A token is outside the vocabulary.
        """
        ids = list(tokens)
        invalid = next((token for token in ids if not 0 <= token < VOCAB_SIZE), None)
        if invalid is not None:
            raise ValueError(
                f"ByteTokenizer.decode: tokens must be 0 to {VOCAB_SIZE - 1}, got {invalid}. "
                "Pass ids of a model with vocab_size=260."
            )
        return bytes(token for token in ids if token < BOS).decode(errors="replace")


def write_tokenizer(path: Path | str, *, bos: int = 0, eos: int = 1) -> None:
    """Write a tokenizer of bytes beside a checkpoint, in Hugging Face's format.

    Every byte is a token. Bytes get the lowest ids that no special token has, by default 2 to 257.
    The chat template names the role of each message. This function needs transformers.

    >>> from transformers import AutoTokenizer
    >>> write_tokenizer("tiny")
    >>> AutoTokenizer.from_pretrained("tiny").encode("Hi", add_special_tokens=False)
    [41, 74]
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"<s>": bos, "</s>": eos}
    free = (token for token in itertools.count() if token not in special.values())
    vocabulary = {letter: next(free) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(vocab=special | vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    wrapped.chat_template = (
        "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    wrapped.save_pretrained(path)


def real_text(num_bytes: int) -> str:
    """Return ``num_bytes`` bytes of ASCII English text: the Zen of Python, then docstrings.

    If the Python installation has too few docstrings, the text repeats.
    """
    parts = ["Beautiful is better than ugly.\n"]
    size = 0
    for part in _sources():
        parts = [part] if not size else [*parts, part]
        size += len(part)
        if size >= num_bytes:
            break
    text = "\n".join(parts)
    return (text * (num_bytes // len(text) + 1))[:num_bytes]


def prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return consecutive parts of ``real_text`` as prompts of ``num_tokens`` tokens, with BOS."""
    each = num_tokens - 1
    text = real_text(num_prompts * each)
    return [
        ByteTokenizer().encode(text[start : start + each], bos=True)
        for start in range(0, num_prompts * each, each)
    ]


def _sources() -> Iterator[str]:
    with (
        contextlib.suppress(ImportError, AttributeError),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        this = importlib.import_module("this")  # the import prints the text
        yield _ascii(codecs.decode(this.s, "rot13"))
    with contextlib.suppress(ImportError, AttributeError):
        yield _ascii(importlib.import_module("heapq").__about__)  # a text about heaps
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            members = [
                member for _, member in sorted(vars(module).items(), key=lambda item: item[0])
            ]
            own = [m for m in members if getattr(m, "__module__", None) == name]
            yield from filter(None, (_ascii(inspect.getdoc(m) or "") for m in [module, *own]))


def _ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode()
