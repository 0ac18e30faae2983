"""The command ``serve``: Hugging Face's server with a patched model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, install_extra

OP = "serve"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("path", metavar="MODEL", help="folder or name of a model with a tokenizer")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument(
        "--port", type=int, default=8000, help="0 takes a free port, default: %(default)s"
    )
    parser.add_argument(
        "--quantized", action="store_true", help="load a released folder in its FP8 and FP4"
    )
    parser.add_argument("--device", help="cpu or cuda, default: a GPU if there is one")
    parser.add_argument(
        "--dtype", default="auto", help="bfloat16, float32 or float16, default: that of the files"
    )
    parser.add_argument(
        "--kv",
        default="fp8",
        metavar="{fp8,bf16,fp32,ds_fp8}",
        help="how keys are stored, default: %(default)s; ds_fp8 is for V3 and V2 only",
    )
    parser.add_argument(
        "--precision",
        default="serve",
        metavar="{serve,reference}",
        help="follow the official code, or Hugging Face's; default: %(default)s",
    )
    parser.add_argument(
        "--compile",
        metavar="BACKEND",
        help="compile the steps, for example with inductor; default: do not",
    )
    parser.add_argument(
        "--no-graphs", dest="graphs", action="store_false", help="run steps without CUDA graphs"
    )
    for name, default, text in (
        ("max-cache-len", 8192, "tokens of a request"),
        ("max-requests", 32, "requests of a step"),
        ("max-batch-tokens", 1024, "tokens of a step"),
        ("max-queue", 256, "requests that wait or run"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"maximum {text}, default: %(default)s"
        )
    parser.add_argument("--num-blocks", type=int, help="blocks of the cache, default: by memory")


def server(path: str, **settings: Any) -> Any:
    """Return a ``Server``; raise if a package that the server needs is missing."""
    from dsv4_ops.integrations.transformers.batching.hooks import check_release

    check_release(OP)
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise argument_error(
            OP,
            "fastapi, uvicorn, pydantic and openai",
            must="be installed",
            got="not all of them",
            do=install_extra("serve"),
            kind=ImportError,
        )
    checks = Checks(OP)
    checks.kind("MODEL", path, (str, Path), must="be a str", do="Name a folder")
    path = str(path)
    is_name = path.count("/") == 1 and path[0] not in "./~"
    if not Path(path).exists() and not is_name:
        raise argument_error(
            OP,
            "MODEL",
            must="be a folder, or a name of the Hub such as deepseek-ai/DeepSeek-V3",
            got=repr(path),
            do="Name a folder that exists",
        )
    checks.device_name("device", settings.get("device"))
    from dsv4_ops.integrations.transformers.serving import Server

    return Server(path, **settings)
