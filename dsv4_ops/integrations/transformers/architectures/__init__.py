"""Model families. A family makes a spec from a model's configuration and runs the model's layers.

``base.ModelSpec`` is the interface of a family; ``spec_of_config`` selects the family of a
configuration. To add a family, subclass ``ModelSpec`` and name the subclass in ``FAMILIES``.
"""

from __future__ import annotations

import importlib
from typing import Any

from dsv4_ops.attention import ContextParallel
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers.architectures.base import (
    Execution,
    ModelSpec,
    require_transformers,
)
from dsv4_ops.integrations.transformers.recipe import Recipe

_HERE = "dsv4_ops.integrations.transformers.architectures"

FAMILIES = {
    "deepseek_v2": ("deepseek_v3", "MlaModelSpec"),
    "deepseek_v3": ("deepseek_v3", "MlaModelSpec"),
    "deepseek_v32": ("deepseek_v32", "DsaModelSpec"),
    "glm_moe_dsa": ("deepseek_v32", "DsaModelSpec"),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4Spec"),
}
"""Module and class of every ``model_type``."""


def spec_of_config(
    op: str, config: Any, kv: str, precision: str | Recipe, **settings: Any
) -> ModelSpec:
    """Build the spec of ``config``, or raise an error that names ``op`` if we do not support it.

    The other arguments are arguments of ``patch``; ``settings`` are the fields of ``Execution``.
    """
    require_transformers(op)
    model_type = getattr(config, "model_type", type(config).__name__)
    if model_type not in FAMILIES:
        raise argument_error(
            op,
            "model_type",
            must="be " + " or ".join(map(repr, FAMILIES)),
            got=model_type,
            do="Pass a DeepSeek model for causal language modelling, or its configuration",
            kind=NotImplementedError,
        )
    Checks(op).instance("parallel", settings.get("parallel"), ContextParallel)
    module, name = FAMILIES[model_type]
    family: type[ModelSpec] = getattr(importlib.import_module(f"{_HERE}.{module}"), name)
    return family.of(op, config, kv, Recipe.named(op, precision), Execution(**settings))
