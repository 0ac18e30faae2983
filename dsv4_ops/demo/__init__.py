"""A small DeepSeek-V4, stock Hugging Face beside ours: ``python -m dsv4_ops demo``.

``demo.model`` is the model, ``demo.text`` its tokenizer and text; examples and tests use them too.
"""
