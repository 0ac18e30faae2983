"""The key of a compiled part, and that the loaded part is the compiled one."""

import copy
import functools
import importlib
import os
import stat
import sys
from pathlib import Path
from types import MethodType, ModuleType

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

import dsv4_ops
from dsv4_ops.core.fingerprint import source_hash
from dsv4_ops.core.torch_compat import SizeGuards
from dsv4_ops.integrations.transformers import (
    PagedCache,
    StepBatch,
    compile_step,
    load_quantized,
    patch,
)
from dsv4_ops.integrations.transformers.compile_cache import kernel_files, precompiled
from dsv4_ops.integrations.transformers.compile_cache.precompiled import (
    PartsFile,
    PartsFolder,
    Undescribed,
    Watch,
    compiled,
    described,
    environment,
    folder_of_parts,
    loaded,
    outline,
    state,
)
from dsv4_ops.integrations.transformers.modules.replacement import REPLACED, own_forward
from dsv4_ops.integrations.transformers.steps import compiled as steps_compiled
from dsv4_ops.testing.mla_checkpoint import write_mla_checkpoint
from dsv4_ops.testing.models import small_mla_model

SETTINGS = {"fullgraph": True, "dynamic": False}


class Block(nn.Module):
    def __init__(self, index=0, factor=2.0, width=4, **form):
        super().__init__()
        self.layer_idx, self.factor = index, factor
        self.inner = nn.Linear(width, 4, bias=False, **form)


def changed(change):
    block = Block()
    change(block)
    return block


def test_a_forward_of_a_class_is_left_out_only_if_patch_replaced_it(monkeypatch):
    """transformers decorates the class of FP8 experts again for each layer that it makes."""
    replaced, own, plain = (Block() for _ in range(3))
    for block in (replaced, own):
        block.forward = changed
    vars(replaced)[REPLACED] = None
    cases = ([replaced], [own], [plain], [replaced, plain])
    before = [described(case) for case in cases]
    monkeypatch.setattr(Block, "forward", lambda self, x: x, raising=False)
    monkeypatch.setattr(Block, "__init__", nn.Module.__init__)
    monkeypatch.setattr(Block, "_can_set_experts_implementation_cached_value", True, raising=False)
    same = [described(case) == text for case, text in zip(cases, before, strict=True)]
    assert same == [True, False, False, False]


def test_copies_of_an_object_change_nothing_that_is_described():
    """At its first use, ``copy``, ``pickle`` or a compile writes a name into the object's class."""
    module = ModuleType("held")

    class Held:
        factor = 2.0

    Held.__module__ = "held"
    module.Held = Held
    assert "__slotnames__" not in vars(Held)
    watch, names = Watch(), outline(module)
    before = described([Held(), Block()], watch)
    copy.copy(Held())
    copy.copy(Block())
    assert watch.unchanged()
    assert described([Held(), Block()]) == before
    del precompiled._OUTLINES[module]
    assert outline(module) == names
    Held.factor = 3.0
    assert not watch.unchanged()
    assert outline(module) != names


def test_what_loading_leaves_on_a_model_is_not_described(tmp_path):
    """It has regular expressions, and a list whose order depends on the process."""
    path = write_mla_checkpoint(tmp_path, "glm5")
    models = [patch(load_quantized(path)) for _ in range(2)]
    models[1].hf_quantizer.modules_to_not_convert.reverse()
    assert described(models[:1]) == described(models[1:])


def test_what_a_trace_can_read_is_described():
    """The exceptions are values of weights, and the number of a layer."""
    x = torch.zeros(3)
    expected = described([Block(), x])
    assert described([Block(index=7), torch.ones(3)]) == expected
    others = {
        "constant": (Block(factor=3.0), x),
        "kind of constant": (Block(factor=2), x),
        "width": (Block(width=5), x),
        "dtype": (Block(dtype=torch.bfloat16), x),
        "device": (Block(device="meta"), x),
        "training": (Block().eval(), x),
        "hook": (changed(lambda b: b.inner.register_forward_hook(print)), x),
        "method": (changed(lambda b: setattr(b, "forward", MethodType(changed, b))), x),
        "gradient": (changed(lambda b: b.requires_grad_(False)), x),
        "attribute": (changed(lambda b: setattr(b, "more", None)), x),
        "stride": (Block(), torch.zeros(6)[::2]),
        "shape": (Block(), torch.zeros(4)),
        "one less": (Block(),),
    }
    found = {name: described(list(values)) for name, values in others.items()}
    assert len({expected, *found.values()}) == 1 + len(others)


def test_what_is_shared_is_described():
    whole, other = torch.zeros(6), torch.zeros(6)
    half = whole[:3]
    pairs = [[whole, other], [whole, whole], [half, whole[3:]], [half, whole[2:5]]]
    found = [described(pair) for pair in (*pairs, [half, other[3:]])]
    assert len(set(found)) == len(found)
    assert described([whole[1:4], whole[2:5]]) == described([whole[0:3], whole[1:4]])


def test_layers_of_dense_mla_are_described_alike():
    """Addresses of weights, which a patched layer stores, distinguish neither layers nor runs."""
    models = [patch(small_mla_model(), kv="bf16") for _ in range(2)]
    dense, *experts = models[0].model.layers
    expected = described([experts[0]])
    assert described([dense]) != expected
    for layer in (experts[1], *models[1].model.layers[1:]):
        assert described([layer]) == expected


def test_functions_are_described_by_their_code_and_what_they_hold():
    def adding(number):
        return lambda x: x + number

    assert described([adding(1)]) == described([adding(1)])
    assert described([adding(1)]) != described([adding(2)])
    assert described([lambda x: x + 1]) != described([lambda x: x - 1])


@pytest.mark.parametrize(
    "value", [object(), torch.zeros(2).to_sparse(), iter(()), torch.Generator()]
)
def test_what_cannot_be_compared_is_not_described(value):
    with pytest.raises(Undescribed):
        described([value])


class Scale:
    """An object without a dictionary."""

    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by


class Scaled(nn.Module):
    """A user's module, with a value in every place that a trace can read."""

    power = 2.0

    def __init__(self, by=3.0):
        super().__init__()
        self.scale = Scale(by)
        self.register_buffer("shift", torch.zeros(4))
        self.act = self.closure()

    def closure(self):
        factor = 1.0

        def act(x):
            return x * factor

        return act

    def forward(self, x):
        return self.act(x) ** self.power * self.scale.by + self.shift


def test_classes_are_described(monkeypatch):
    """Constants and methods, which programs can assign, in a user's class and in transformers'."""
    norm = type(patch(small_mla_model()).model.norm)
    for kind, make in ((Scaled, Scaled), (norm, lambda: norm(4))):
        found = [described([make()])]
        assert described([make()]) == found[0]
        monkeypatch.setattr(kind, "power", 3.0, raising=False)
        found.append(described([make()]))
        monkeypatch.setattr(kind, "forward", lambda self, x: x)
        found.append(described([make()]))
        monkeypatch.setattr(kind, "forward", lambda self, x, by=2.0: x)
        found.append(described([make()]))
        monkeypatch.setattr(kind, "power", property(lambda self: 2.0))
        found.append(described([make()]))
        assert len(set(found)) == len(found)


def test_a_set_in_code_is_described_in_one_order():
    """Python's order of strings in a set depends on the process."""
    names = frozenset({"b", "a", "c"})
    assert precompiled._constant(names) == "[\"'a'\", \"'b'\", \"'c'\"]"


def test_a_change_is_seen(monkeypatch):
    def watched():
        block, watch = Block(), Watch()
        block.more = Scaled()
        described([block, [block.inner]], watch)
        return block, watch

    changes = {
        "slot": lambda block: setattr(block.more.scale, "by", 4.0),
        "slot left empty": lambda block: delattr(block.more.scale, "by"),
        "buffer": lambda block: block.more.shift.resize_(5),
        "closure": lambda block: setattr(block.more.act.__closure__[0], "cell_contents", 2.0),
        "class": lambda block: monkeypatch.setattr(Scaled, "power", 4.0),
        "method": lambda block: monkeypatch.setattr(Scaled, "forward", lambda self, x: x),
        "constant": lambda block: setattr(block, "factor", 3.0),
        "weight": lambda block: setattr(block.inner, "weight", nn.Parameter(torch.zeros(4, 4))),
        "data": lambda block: setattr(block.inner.weight, "data", torch.zeros(4, 4).double()),
        "hook": lambda block: block.inner.register_forward_hook(print),
        "module": lambda block: setattr(block, "inner", nn.Linear(4, 4, bias=False)),
    }
    for change in changes.values():
        block, watch = watched()
        assert watch.unchanged()
        change(block)
        assert not watch.unchanged()


def test_switches_are_described():
    device = torch.device("cpu")
    before = state(device)
    with torch.autocast("cpu"):
        assert state(device) != before
        with torch.autocast("cpu", dtype=torch.float16):
            half = state(device)
        assert state(device) != half
    with torch.inference_mode():
        assert state(device) != before
    assert state(device) == before
    expected = environment(SETTINGS)
    assert environment({**SETTINGS, "dynamic": True}) != expected
    assert environment({**SETTINGS, "options": {"max_autotune": True}}) != expected
    with torch._inductor.config.patch(epilogue_fusion=False):
        assert environment(SETTINGS) != expected
    for settings in ({"backend": "eager"}, {"mode": "max-autotune"}, {"dynamic": None}):
        with pytest.raises(Undescribed):
            environment({**SETTINGS, **settings})


@pytest.mark.parametrize("folder", ["attention", "integrations", "kernels", "lowering", "meta"])
def test_a_part_is_for_the_sources_of_the_whole_package(folder, monkeypatch):
    """A source that no trace inlines, such as that of a kernel, counts too."""
    monkeypatch.setattr(precompiled, "source_hash", source_hash.__wrapped__)
    before, read = environment(SETTINGS), Path.read_bytes
    source = next((Path(dsv4_ops.__file__).parent / folder).rglob("*.py"))
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == source))
    assert environment(SETTINGS) != before


def scaled(block, x):
    return (block.inner(x) * block.factor).sin()


def numbered(block, x):
    return x + block.layer_idx


def test_a_part_is_loaded_without_a_trace(tmp_path):
    """The part serves every layer of the kind: it reads weights from its argument."""
    blocks, x = [Block(index) for index in range(2)], torch.randn(3, 4)
    part, content = compiled(scaled, (blocks[0], x), SETTINGS)
    file = PartsFile(tmp_path / "step.cache", SETTINGS)
    file.keep("a part", content)
    file.write(None)
    assert not file.has_more
    torch._dynamo.reset()
    counters.clear()
    again = PartsFile(tmp_path / "step.cache", SETTINGS)
    assert again.find("another") is None
    found = loaded(again.find("a part"), globals())
    for block in blocks:
        torch.testing.assert_close(found.run(block, x), scaled(block, x))
        assert torch.equal(found.run(block, x), part.run(block, x))
    assert counters["stats"]["unique_graphs"] == 0
    other = {**SETTINGS, "options": {"max_autotune": True}}
    assert PartsFile(tmp_path / "step.cache", other).find("a part") is None


def test_a_part_brings_no_kernels_for_other_graphs(monkeypatch):
    """A trace finds kernels by numbers that differ between processes."""
    table, other = {0: scaled}, {0: numbered}
    monkeypatch.setattr(kernel_side_table, "id_to_kernel", table)
    made = compiled(scaled, (Block(), torch.ones(4)), SETTINGS)
    assert made is not None
    assert kernel_side_table.id_to_kernel is table
    monkeypatch.setattr(kernel_side_table, "id_to_kernel", other)
    assert loaded(made[1], globals()) is not None
    assert other == {0: numbered}


def test_a_part_that_reads_which_layer_it_is_is_not_kept():
    assert compiled(numbered, (Block(), torch.ones(3)), SETTINGS) is None


def asking(block, x):
    return x + 1 if own_forward(block) is None else x


def test_a_part_that_asks_for_a_replaced_forward_is_kept():
    """``with_methods`` returns the earlier forward, which does not belong to one layer only."""
    replaced, own = Block(), Block()
    replaced.__dict__ |= {"forward": MethodType(scaled, replaced), REPLACED: None}
    own.__dict__ |= {"forward": MethodType(scaled, own), REPLACED: numbered}
    assert described([replaced]) != described([own])
    x = torch.ones(3)
    for block, expected in ((replaced, x + 1), (own, x)):
        part, _ = compiled(asking, (block, x), SETTINGS)
        assert torch.equal(part.run(block, x), expected)


def calling(module, x):
    return module.function(x)


def test_a_part_of_other_sources_is_not_loaded(tmp_path, monkeypatch):
    """This holds even for a package that no description names, and if other files are equal."""
    source, *others = (tmp_path / f"inlined_by_a_part_{number}.py" for number in range(2))
    monkeypatch.syspath_prepend(str(tmp_path))
    for each in (*others, source):
        each.write_text("def function(x):\n    return x + 1\n")
        module = importlib.import_module(each.stem)
        _, content = compiled(calling, (module, torch.ones(3)), SETTINGS)
        assert loaded(content, {}) is not None
    source.write_text("def function(x):\n    return x + 2\n")
    importlib.invalidate_caches()
    del sys.modules[source.stem]
    assert loaded(content, {}) is None
    assert loaded(b"something else", {}) is None


def test_a_part_is_for_the_names_that_its_modules_had(tmp_path, monkeypatch):
    """If a program assigns a name in a module, it neither stores nor loads the shared part."""
    source = tmp_path / "assigned_by_a_program.py"
    source.write_text("BY = 2.0\n\ndef inner(x):\n    return x * BY\n\n")
    source.write_text(source.read_text() + "def function(x):\n    return inner(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(source.stem)
    makes = [lambda: None, lambda: monkeypatch.setattr(module, "BY", 3.0)]
    others = (lambda x: x, torch.sin, torch.cos)
    makes += [functools.partial(monkeypatch.setattr, module, "inner", each) for each in others]
    contents = []
    for make in makes:
        make()
        torch._dynamo.reset()
        contents.append(compiled(calling, (module, torch.ones(3)), SETTINGS)[1])
        assert [loaded(each, globals()) is not None for each in contents] == [
            each is contents[-1] for each in contents
        ]


def test_a_damaged_part_is_not_loaded():
    _, content = compiled(scaled, (Block(), torch.ones(3, 4)), SETTINGS)
    for place in (len(content) - 20, content.index(b'"condition"') + 15):  # in sizes too
        damaged = content[:place] + b"?" + content[place + 1 :]
        assert loaded(damaged, globals()) is None
    assert loaded(content[:-1], globals()) is None
    assert loaded(content, globals()) is not None


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_the_log_names_the_file_of_a_part_that_is_not_loaded(kind, tmp_path, monkeypatch):
    """The step's first part logs it; a second process finds an existing file."""
    model = patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")
    cache = PagedCache.for_model(model, max_batch_size=1, max_cache_len=64)
    row = cache.add("a", num_tokens=1)
    batch = StepBatch(torch.tensor([7]), *(torch.tensor(v).int() for v in ([0, 1], [1], [row])))
    monkeypatch.setenv("DSV4_OPS_CACHE", str(tmp_path / "parts"))
    place = {} if kind == "folder" else {"cache_file": tmp_path / "parts"}
    monkeypatch.setattr(PartsFolder if kind == "folder" else PartsFile, "find", lambda *_: b"{}\n")

    def stop(*_):
        raise StopIteration

    monkeypatch.setattr(steps_compiled, "compiled", stop)
    lines = []
    monkeypatch.setattr(precompiled._log, "info", lambda text, *v: lines.append(text % v))
    with pytest.raises(StopIteration):
        compile_step(model, mode="regional", **place)(batch, cache)
    (line,) = lines
    assert str(tmp_path / "parts") in line.partition(" is not loaded: ")[0]


def test_guards_of_sizes():
    """The trace has seven tokens of two requests; guards refuse sizes that it rules out."""
    guards = SizeGuards(
        "((s1) == (s2 + 1)) and (s0 >= s2)",
        {"s0": "L['args'][0].size()[0]", "s1": "L['args'][1].size()[0]", "s2": "L['args'][2]"},
    )
    cases = (((7, 3, 2), True), ((7, 4, 2), False), ((1, 3, 2), False), ((2, 3, 2), True))
    for (tokens, starts, requests), holds in cases:
        args = torch.zeros(tokens), torch.zeros(starts), requests
        assert guards.hold({"args": args}) is holds
    assert not guards.hold({"args": (torch.zeros(7), None, 2)})


def test_a_folder_of_parts(tmp_path, capsys, monkeypatch):
    """Processes with equal settings share a folder; if it cannot be written, only time is lost."""
    ours, others = (PartsFolder(tmp_path / "parts", SETTINGS) for _ in range(2))
    ours.keep("a layer/123.0", b"of code")
    assert others.find("a layer/123.0") == b"of code"
    assert others.find("a layer/124.0") is None
    parts = PartsFolder(tmp_path / "parts", SETTINGS | {"dynamic": True})
    assert parts.find("a layer/123.0") is None
    (tmp_path / "a file").touch()
    blocked = PartsFolder(tmp_path / "a file", SETTINGS)
    blocked.keep("a layer/123.0", b"of code")
    assert blocked.find("a layer/123.0") is None
    PartsFile(tmp_path / "a file" / "step.cache", SETTINGS).write(None)
    assert "step.cache is not written" in capsys.readouterr().err
    monkeypatch.setattr(kernel_files, "code_folder", lambda: tmp_path / "a file")
    kernel_files.put({"code/ab/kernel.so": b"of code"})


def test_where_parts_are_kept(tmp_path, monkeypatch):
    """Parts are in the user's cache folder, but not in a folder that other users can write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "a file").touch()
    for setting, expected in (
        ("off", None), (str(tmp_path), tmp_path), (str(tmp_path / "a file"), None)
    ):  # fmt: skip
        monkeypatch.setenv("DSV4_OPS_CACHE", setting)
        assert folder_of_parts() == expected
    monkeypatch.delenv("DSV4_OPS_CACHE")
    folder = folder_of_parts()
    assert folder == tmp_path / "caches" / "dsv4_ops"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert folder_of_parts() is None
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert folder_of_parts() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder_of_parts() == tmp_path / "home" / ".cache" / "dsv4_ops"
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert folder_of_parts() is None
