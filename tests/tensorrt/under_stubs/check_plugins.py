"""apply_rope's plugin passes TensorRT's validators, and the op is part of an engine."""

import operator
import types

import pytest
import tensorrt
import tensorrt.plugin as plugin
import torch
import torch_tensorrt
from tensorrt.plugin import _tensor
from tensorrt.plugin._lib import QDP_REGISTRY
from torch import nn

from dsv4_ops.integrations.tensorrt import enable, plugins, register_plugins

OPS = ("apply_rope", "combine_topk_swa_indices", "indexer_logits")


class Rope(nn.Module):
    def forward(self, x, positions, table):
        return torch.ops.dsv4_ops.apply_rope(x * 2, positions, table, inverse=False) + 1


@pytest.fixture(autouse=True)
def registered():
    enable()
    for _ in range(2):  # a second call does nothing
        assert register_plugins(capability=(9, 0)) == OPS


def described(dtype, *shape):
    return plugin.TensorDesc(plugin.ShapeExprs.from_tuple(shape), dtype)


def segments(module, *inputs, shapes=None):
    """Return the names of the parts of a compiled module, whose results are right."""
    program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    settings = {"dryrun": True, "min_block_size": 1}
    found = torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, **settings)
    assert torch.equal(found(*inputs), module(*inputs))
    return [name for name, _ in found.named_children()]


def rows(dtype, dim):
    return torch.randn(3, 4, dim).to(dtype), torch.tensor([1, 2, 3]), torch.randn(16, 32)


TOKENS = {0: torch.export.Dim("tokens", min=2, max=64)}


def test_it_joins_the_engine_of_its_neighbours():
    assert segments(Rope(), *rows(torch.float32, 128)) == ["_run_on_acc_0"]
    shapes = TOKENS, TOKENS, None
    assert segments(Rope(), *rows(torch.bfloat16, 64), shapes=shapes) == ["_run_on_acc_0"]


class Combine(nn.Module):
    def forward(self, indices, *tensors):
        return torch.ops.dsv4_ops.combine_topk_swa_indices(indices + 1, *tensors, **SETTINGS)[0] + 1


SETTINGS = {"window_size": 4, "compress_ratio": 4, "topk": 2, "workspace_rows": 20, "swa_offset": 8}


def test_two_outputs_join_an_engine():
    integers = (torch.tensor(each).int() for each in ([0], [9], [5]))
    inputs = (torch.tensor([[1, 0]]).int(), torch.tensor([7]), *integers)
    assert segments(Combine(), *inputs) == ["_run_on_acc_0"]


class Score(nn.Module):
    def forward(self, q, *tensors):
        settings = {"block_size": 4, "num_rows": 7, "layout": "plain"}
        return torch.ops.dsv4_ops.indexer_logits(q * 2, *tensors, None, **settings) + 1


def test_scores_join_an_engine():
    """The optional schedule gets a placeholder: TensorRT's plugins have no optional tensors."""
    tensors = torch.randn(3, 2, 128), torch.randn(3, 2), torch.randn(5, 4, 128)
    integers = (torch.tensor([7, 1, 0]), torch.tensor([0, 1, -1]), torch.tensor([[3, 1], [2, 9]]))
    inputs = (*tensors, *(each.int() for each in integers))
    shapes = TOKENS, (TOKENS, None, TOKENS, TOKENS, None)
    assert segments(Score(), *inputs, shapes=shapes) == ["_run_on_acc_0"]


@pytest.mark.parametrize(
    ("q", "heads", "schedule", "settings"),
    [
        (torch.float16, 2, None, {}),
        (torch.bfloat16, 65, None, {}),
        (torch.bfloat16, 2, torch.zeros(3, 2).int(), {}),
        (torch.bfloat16, 2, None, {"layout": "v4_indexer_fp8"}),
        (torch.bfloat16, 2, None, {"impl": "reference"}),
    ],
)
def test_other_scores_stay_in_pytorch(q, heads, schedule, settings):
    known = {"block_size": 4, "num_rows": 7, "layout": "plain"}
    tensors = [torch.empty(3, heads, 128, dtype=q), *[torch.empty(0)] * 5]
    takes = plugins._PLUGINS["indexer_logits"].takes
    assert not takes(*tensors, schedule, **{**known, **settings})
    fitting = [torch.empty(3, 64, 128, dtype=torch.bfloat16), *tensors[1:]]
    assert takes(*fitting, None, **known)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 128), (torch.float32, 96)])
def test_other_calls_stay_in_pytorch(dtype, dim):
    found = segments(Rope(), *rows(dtype, dim))
    assert found == ["_run_on_acc_0", "_run_on_gpu_1", "_run_on_acc_2"]


def test_the_output_is_like_x():
    """By mistake, ``generate_plugin`` would give every output the dtype of the first input."""
    definition = QDP_REGISTRY["dsv4_ops::apply_rope"]
    assert definition.input_tensor_names == ["x", "positions", "cos_sin_cache"]
    assert definition.input_attrs == {"inverse": bool}
    out = definition.register_func(described(tensorrt.bfloat16, 3, 4, 128), None, None, False)
    assert out.dtype == tensorrt.bfloat16


class Constant:
    """A known size instead of an ``IDimensionExpr``, which has no constructor."""

    def __init__(self, value):
        self.value = value

    def is_constant(self):
        return True

    def get_constant_value(self):
        return self.value


class Builder:
    """TensorRT's ``IExprBuilder`` over constants."""

    def constant(self, value):
        return Constant(value)

    def operation(self, kind, left, right):
        kinds = tensorrt.DimensionOperation
        known = {kinds.PROD: operator.mul, kinds.FLOOR_DIV: operator.floordiv}
        return Constant(known[kind](left.value, right.value))


@pytest.fixture
def known_sizes(monkeypatch):
    monkeypatch.setattr(_tensor.trt, "IDimensionExpr", Constant)
    monkeypatch.setattr(_tensor.SymIntExpr, "_exprBuilder", Builder())


def test_the_launch_is_one_block_per_row(known_sizes):
    x = described(tensorrt.bfloat16, 6, 4, 128)
    inputs = x, described(tensorrt.int64, 6), described(tensorrt.float32, 16, 64)
    aot = QDP_REGISTRY["dsv4_ops::apply_rope"].aot_impl_func
    name, ptx, launch, numbers = aot(*inputs, True, (), None)
    assert name == "apply_rope_kernel"
    assert sum(line.strip().startswith(".param") for line in ptx.splitlines()) == 6
    sizes = (launch.grid_x, launch.grid_y, launch.block_x, launch.shared_mem, *numbers)
    assert [each._expr.value for each in sizes] == [24, 1, 32, 0, 4, 16]


def test_combine_has_two_int32_outputs_and_a_block_per_token(known_sizes):
    lists = described(tensorrt.int32, 6, 3), described(tensorrt.int64, 6)
    inputs = (*lists, described(tensorrt.int32, 6), *[described(tensorrt.int32, 2)] * 2)
    definition = QDP_REGISTRY["dsv4_ops::combine_topk_swa_indices"]
    assert list(definition.input_attrs) == list(SETTINGS)
    found = definition.register_func(*inputs, *SETTINGS.values())
    assert [each.dtype for each in found] == [tensorrt.int32] * 2
    assert [size._expr.value for size in found[0].shape_expr] == [6, 128]
    _, ptx, launch, numbers = definition.aot_impl_func(*inputs, *SETTINGS.values(), (), None)
    assert sum(line.strip().startswith(".param") for line in ptx.splitlines()) == 9
    assert [each._expr.value for each in (launch.grid_x, *numbers)] == [6, 3, 2]


def test_scores_are_float32_and_a_block_per_token_and_64_rows(known_sizes):
    q, k_cache = (described(tensorrt.bfloat16, *size, 128) for size in ((6, 2), (5, 4)))
    integers = (described(tensorrt.int32, *size) for size in ((6,), (6,), (3, 9)))
    inputs = q, described(tensorrt.float32, 6, 2), k_cache, *integers
    definition = QDP_REGISTRY["dsv4_ops::indexer_logits"]
    assert definition.input_attrs == {"num_rows": int, "block_size": int}
    scores = definition.register_func(*inputs, 130, 4)
    assert scores.dtype == tensorrt.float32
    assert [size._expr.value for size in scores.shape_expr] == [6, 130]
    _, ptx, launch, numbers = definition.aot_impl_func(*inputs, 130, 4, (), None)
    assert sum(line.strip().startswith(".param") for line in ptx.splitlines()) == 10
    assert [each._expr.value for each in (launch.grid_x, *numbers)] == [18, 3, 9, 5]


def test_the_converter_passes_the_keyword_argument(monkeypatch):
    """torch-tensorrt's ``generate_plugin_converter`` passes positional arguments only."""
    from torch_tensorrt.dynamo.conversion import converter_utils

    calls, layers = [], []
    monkeypatch.setattr(converter_utils, "get_trt_tensor", lambda ctx, tensor, name: tensor)
    op = types.SimpleNamespace(apply_rope=lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(plugin, "op", types.SimpleNamespace(dsv4_ops=op))

    def add_plugin(made, aot):
        layers.append(types.SimpleNamespace(aot=aot, get_output=lambda place: ("out", place)))
        return layers[-1]

    ctx = types.SimpleNamespace(net=types.SimpleNamespace(add_plugin=add_plugin))
    found = plugins._convert(
        "apply_rope", ctx, "target", ("x", "p", "t"), {"inverse": True}, "node"
    )
    assert found == ("out", 0)
    assert calls == [(("x", "p", "t"), {"inverse": True})]
    assert layers[0].aot is True
