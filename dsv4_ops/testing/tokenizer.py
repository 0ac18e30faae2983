"""A byte tokenizer with a chat template, for small models on disk."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dsv4_ops.testing.text import VOCAB_SIZE


def write_tokenizer(path: Path | str, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a tokenizer of the 256 bytes, and of tokens such as "<256>" that no text contains."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters += [f"<{n}>" for n in range(len(letters), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(path)
