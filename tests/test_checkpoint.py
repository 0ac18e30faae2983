"""Checkpoints in the released format: their tensors, refused files, and what loads them."""

import json
import re
from collections import Counter
from functools import partial
from math import prod

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dsv4_ops.__main__ import main
from dsv4_ops.checkpoint import format as checkpoint
from dsv4_ops.checkpoint.format import check_checkpoint, released_tensors, weight_bytes
from dsv4_ops.testing import checkpoint as testing_checkpoint
from dsv4_ops.testing.checkpoint import FLASH, PRO, TINY, quantize_fp4, tensors, write_checkpoint
from dsv4_ops.testing.contract.compare import equal
from dsv4_ops.testing.float64.experts import fp4_values
from dsv4_ops.testing.float64.linear import block_values
from tests.helpers import NIGHTLY
from tests.support.mutated import NUMBERS, accepts, mutated, restored

SMALL = {
    **TINY,
    "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "o_groups": 1, "n_routed_experts": 2, "num_hash_layers": 1, "compress_ratios": [4, 0],
}  # fmt: skip
BYTES = {"I8": 1, "F8_E8M0": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
AGAIN = "Download the file again, or convert it from the released one."


def num_bytes(info):
    return prod(info.shape) * BYTES[info.dtype]


def test_flash_has_the_tensors_that_its_headers_were_seen_with():
    """Counts and bytes are from the headers of revision 60d8d707."""
    found = released_tensors(FLASH)
    assert len(found) == 69_187
    assert sum(map(num_bytes, found.values())) == 159_609_485_896
    counts = {"I8": 33_792, "F8_E8M0": 34_167, "F8_E4M3": 375, "BF16": 433, "F32": 417, "I64": 3}
    assert Counter(info.dtype for info in found.values()) == counts
    assert len([name for name in found if name.startswith("mtp.")]) == 1575
    assert found["layers.2.attn.wo_a.scale"].shape == (64, 32)
    assert found["layers.0.ffn.experts.255.w2.scale"].shape == (4096, 64)
    assert found["layers.3.attn.compressor.ape"].shape == (128, 512)
    assert found["layers.2.attn.indexer.compressor.ape"].shape == (4, 256)


def test_pro_has_the_tensors_that_its_headers_were_seen_with():
    found = released_tensors(PRO)
    assert len(found) == 145_116
    assert round(sum(map(num_bytes, found.values())) / 1e9, 1) == 864.7


def test_a_size_that_is_no_whole_block_is_refused():
    message = "released_tensors: attn.wq_a must have sizes that are multiples of 128, got 96. "
    with pytest.raises(ValueError, match=re.escape(f"{message}Correct the config.")):
        released_tensors({**TINY, "q_lora_rank": 96})


@pytest.mark.parametrize("read", [released_tensors, weight_bytes])
def test_a_config_without_a_size_is_refused_by_name(read):
    config = {name: value for name, value in FLASH.items() if name != "n_routed_experts"}
    with pytest.raises(ValueError, match=r"config must have n_routed_experts, got 1 missing"):
        read({**config})
    short = {**FLASH, "compress_ratios": [0, 0]}
    with pytest.raises(ValueError, match=r"config\.compress_ratios must have a ratio for each of"):
        read(short)


def test_weights_on_each_gpu():
    """GB of Flash and Pro per GPU: only experts are split, or heads are split, too."""
    for config, sizes in (
        (FLASH, {1: (156.0, 156.0), 2: (81.9, 79.2), 4: (44.8, 40.8), 8: (26.3, 21.6)}),
        (PRO, {8: (129.8, 111.1), 16: (78.3, 58.2)}),
    ):
        for gpus, expected in sizes.items():
            parts = (weight_bytes(config, num_gpus=gpus, split_heads=on) for on in (False, True))
            found = [sum(each.values()) / 1e9 for each in parts]
            assert tuple(round(each, 1) for each in found) == expected
    parts = weight_bytes(FLASH, num_gpus=4, split_heads=True)
    # 3 x 2048 x 4096 FP4 values, a scale per 32, 256 experts, 43 layers; a quarter of them
    assert parts["experts"] == 43 * 256 // 4 * 3 * 2048 * 4096 * (16 + 1) // 32
    assert parts["shared experts"] == 43 * 3 * (2048 * 4096 + 16 * 32) // 4
    cases = ((3, False, "n_routed_experts, 256, got 3"), (16, True, "o_groups, 8, got 16"))
    for gpus, split, message in cases:
        with pytest.raises(ValueError, match=f"^weight_bytes: num_gpus must divide {message}. "):
            weight_bytes(FLASH, num_gpus=gpus, split_heads=split)


def test_fp4_rounds_to_the_nearest_code_and_ties_to_even():
    row = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.3, 0.0, 1.6]
    packed, scale = quantize_fp4(torch.tensor([row + [0.0] * 20, [0.0] * 32]))
    codes = [0, 2, 2, 4, 4, 6, 6, 7, 8, 9, 0, 3]
    pairs = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert packed.view(torch.uint8)[0].tolist() == pairs + [0] * 10
    assert scale.view(torch.uint8).tolist() == [[127], [0]]  # 6 fits with 2^0; zeros have byte 0


def test_fp8_takes_the_smallest_power_of_two_that_does_not_saturate():
    weight = torch.zeros(128, 384)
    weight[0, 0], weight[5, 128], weight[5, 129] = 448.0, -448.5, 3.0
    codes, scale = testing_checkpoint.quantize_fp8(weight)
    assert scale.view(torch.uint8).tolist() == [[127, 128, 0]]
    assert codes[0, 0].item() == 448.0
    assert codes[5, 128:130].tolist() == [-224.0, 1.5]


@pytest.fixture
def small(tmp_path):
    return write_checkpoint(tmp_path, SMALL, shards=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_the_tiny_checkpoint_is_as_it_says(tiny):
    assert check_checkpoint(tiny) == (427, 14_416_412, "fp4", "F8_E8M0", "mtp", True, "deepseek_v4")
    found = dict(tensors(tiny))
    scales = {name: value for name, value in found.items() if name.endswith(".scale")}
    for name, scale in scales.items():
        exponents = scale.view(torch.uint8)
        assert exponents.max() < 255
        assert exponents[0, 0] == 0, f"{name}: no block of zeros"
        if exponents.numel() > 64:
            used = exponents[exponents > 0].float()
            assert used.max() - used.min() >= 6, name
        codes = found[name.replace(".scale", ".weight")].view(torch.uint8)
        if codes.shape[1] * 2 == exponents.shape[1] * 32:
            assert {*(codes & 0xF).unique().tolist()} == set(range(16)), name
        else:
            assert (codes & 0x7F == 0x7E).any(), f"{name}: nothing reaches 448"
    routed = [scale.float().sum().item() for name, scale in scales.items() if ".experts." in name]
    assert len(set(routed)) == len(routed) == 5 * 8 * 3
    table = found["layers.1.ffn.gate.tid2eid"]
    assert all(len(set(row)) == 2 for row in table.tolist())


def test_a_checkpoint_depends_on_its_seed_only(tmp_path):
    once, again = (
        dict(tensors(write_checkpoint(tmp_path / name, SMALL, shards=shards)))
        for name, shards in (("a", 1), ("b", 3))
    )
    assert once.keys() == again.keys()
    assert all(equal(once[name], again[name]) for name in once)
    other = dict(tensors(write_checkpoint(tmp_path / "c", SMALL, seed=1)))
    assert not torch.equal(once["embed.weight"], other["embed.weight"])


def test_a_base_checkpoint_has_float32_scales_and_fp8_experts(tmp_path):
    path = write_checkpoint(tmp_path, SMALL, family="base")
    assert check_checkpoint(path)[2:4] == ("fp8", "F32")
    scale = dict(tensors(path))["layers.0.ffn.experts.1.w2.scale"]
    assert scale.dtype == torch.float32
    assert torch.equal(scale.log2(), scale.log2().round())


def test_a_config_of_pro_does_not_name_its_experts(tmp_path):
    config = {name: value for name, value in SMALL.items() if name != "expert_dtype"}
    info = check_checkpoint(write_checkpoint(tmp_path, config))
    assert (info.expert_dtype, info.names_experts) == ("fp4", False)


@pytest.mark.parametrize("patterns", [[3], ["("]])
def test_modules_to_not_convert_are_patterns(tmp_path, patterns):
    quantization = {**SMALL["quantization_config"], "modules_to_not_convert": patterns}
    path = write_checkpoint(tmp_path, SMALL)
    (path / "config.json").write_text(json.dumps({**SMALL, "quantization_config": quantization}))
    with pytest.raises(ValueError, match=r"modules_to_not_convert must be a list of patterns, got"):
        check_checkpoint(path)


SCALE = "layers.0.attn.wq_b.scale"


def changed(path, name, value):
    """Replace the checkpoint's tensor ``name``, or remove it if ``value`` is None."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"].get(name, "model-00001-of-00002.safetensors")
    held = load_file(file)
    held.pop(name, None)
    if value is None:
        index["weight_map"].pop(name)
    else:
        held[name] = value
        index["weight_map"][name] = file.name
    save_file(held, file)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def refused(path):
    with pytest.raises(ValueError, match=r"^check_checkpoint: ") as error:
        check_checkpoint(path)
    return str(error.value)


def e8m0(*shape, byte=120):
    return torch.full(shape, byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (SCALE, None, f"path must hold {SCALE}, F8_E8M0 [8, 1], got no such tensor. {AGAIN}"),
        (SCALE, e8m0(1, 8), f"{SCALE} must be F8_E8M0 [8, 1], got F8_E8M0 [1, 8]. "
         "It is transposed."),
        (SCALE, e8m0(1024, 1), f"{SCALE} must be F8_E8M0 [8, 1], got F8_E8M0 [1024, 1]. {AGAIN}"),
        (SCALE, torch.ones(8, 1), f"{SCALE} must be F8_E8M0 [8, 1], got F32 [8, 1]. {AGAIN}"),
        (SCALE, e8m0(8, 1, byte=255), f"{SCALE} must hold bytes of 0 to 254, as 255 is NaN, "
         f"got 8 other values. {AGAIN}"),
        ("head.weight", torch.ones(128, 128), "head.weight must be BF16 [128, 128], "
         f"got F32 [128, 128]. {AGAIN}"),
        ("layers.0.engram.weight", torch.ones(1), "path must hold no tensor that the config has "
         "no place for, got layers.0.engram.weight. Correct config.json."),
    ],
    ids=["missing", "transposed", "of rows", "float32", "NaN", "dtype", "unknown"],
)  # fmt: skip
def test_what_is_not_as_released_is_refused_by_name(small, name, value, message):
    changed(small, name, value)
    assert refused(small) == f"check_checkpoint: {message}"


def test_every_number_is_checked(small):
    """--check reads all dtypes with NaN: FP8 codes, scales, and weights that are not quantised."""
    file, whole = small / SHARD, (small / SHARD).read_bytes()
    header, weights = header_of(file)
    bits = {"F8_E4M3": b"\xff", "F8_E8M0": b"\xff", "BF16": b"\x80\x7f", "F32": b"\x00\x00\x80\xff"}
    kinds = set()
    for name, entry in header.items():
        if entry.get("dtype") in bits:
            start, stop = entry["data_offsets"]
            value = bits[entry["dtype"]]
            at = start + (stop - start) // 2 // len(value) * len(value)
            write_header(file, header, weights[:at] + value + weights[at + len(value) :])
            with pytest.raises(ValueError, match=rf"^check_checkpoint: {re.escape(name)} must hol"):
                check_checkpoint(small, codes=True)
            if not name.endswith(".scale"):
                check_checkpoint(small)
            kinds.add(entry["dtype"])
    assert kinds == bits.keys()
    file.write_bytes(whole)
    check_checkpoint(small, codes=True)


def test_numbers_past_the_first_chunk_are_checked(small, monkeypatch):
    monkeypatch.setattr(checkpoint, "_CHUNK", 64)
    header, weights = header_of(small / SHARD)
    start = header[NORM]["data_offsets"][0]
    for value in (63, 127):  # of 128 bf16 values, which are four chunks
        at = start + 2 * value
        write_header(small / SHARD, header, weights[:at] + b"\xc0\x7f" + weights[at + 2 :])
        with pytest.raises(ValueError, match=rf"^check_checkpoint: {re.escape(NORM)} must hold "):
            check_checkpoint(small, codes=True)


def test_float32_scales_that_are_no_powers_of_two_are_refused(tmp_path):
    path = write_checkpoint(tmp_path, SMALL, shards=2, family="base")
    scale = dict(tensors(path))[SCALE]
    scale[3] *= 1.25
    changed(path, SCALE, scale)
    assert refused(path) == (
        f"check_checkpoint: {SCALE} must hold powers of two only, as loaders make bytes of them, "
        f"got 1 other values. {AGAIN}"
    )


def test_a_missing_shard_is_refused_by_name(small):
    (small / "model-00002-of-00002.safetensors").unlink()
    assert refused(small) == (
        "check_checkpoint: path must hold every shard of its index, "
        "got no model-00002-of-00002.safetensors. Download the shard."
    )


def test_a_truncated_shard_is_refused(small):
    file = small / "model-00001-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert refused(small) == (
        f"check_checkpoint: {file.name} must be as long as its header says, "
        f"got {len(whole) - 1} bytes. {AGAIN}"
    )


INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (INDEX, b"{", "must be JSON, got Expecting property name"),
        (INDEX, b"\xff", "must be JSON, got "),
        (INDEX, b"[]", "must hold names and values, got list. "),
        (INDEX, b"{}", "must hold a weight_map, got none. "),
        (SHARD, b"", "must begin with the size of its header, got 0 in 0 bytes. "),
        (SHARD, bytes([255] * 16), f"must begin with the size of its header, got {2**64 - 1} in "),
        (SHARD, bytes([2, *[0] * 7]) + b"xx", "must be JSON, got Expecting value"),
    ],
)
def test_a_file_of_other_content_is_refused_by_name(small, name, content, message):
    """An example is the text of an error message that was downloaded instead of the file."""
    (small / name).write_bytes(content)
    found = refused(small)
    assert found.startswith(f"check_checkpoint: {name} {message}")
    assert found.endswith(AGAIN)


def header_of(file):
    """Return the header of a file as JSON, and its data."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(file, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


NORM = "layers.0.attn_norm.weight"  # 128 values in bf16, 256 bytes


def _entry(**changed):
    return lambda header: header[NORM].update(changed)


def _moved(*by):
    """Return the norm's offsets, moved by these numbers of bytes."""
    return lambda header: header[NORM].update(
        data_offsets=list(map(sum, zip(header[NORM]["data_offsets"], by, strict=True)))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((_entry(**entry), f"{NORM} must have a dtype, a shape and two data_offsets in its hea")
          for entry in ({"dtype": None}, {"shape": "128"}, {"shape": [128.0]},
                        {"shape": [True, 128]}, {"shape": [-1, -128]}, {"data_offsets": [0]},
                        {"data_offsets": [0, 1, 2]}, {"strides": [1]})),
        (lambda header: header[NORM].pop("shape"), f"{NORM} must have a dtype, a shape and two "),
        (lambda header: header.update({NORM: []}), f"{NORM} must have a dtype, a shape and two "),
        (_entry(dtype="BF17"), f"{NORM} must be of a dtype that safetensors has, got BF17. "),
        (_entry(shape=[2**40, 2**40, 0]), f"{NORM} must have fewer than {2**56} values, got [1"),
        (_entry(shape=[127]), f"{NORM} must have data_offsets of 254 bytes, as BF16 [127] takes, "
         "got 256. "),
        (_entry(dtype="F32"), f"{NORM} must have data_offsets of 512 bytes, as F32 [128] takes, g"),
        (_entry(dtype="F4", shape=[511]), f"{NORM} must have data_offsets of 255.5 bytes, as F4 "),
        (_moved(0, -2), f"{NORM} must have data_offsets of 256 bytes, as BF16 [128] takes, got 2"),
        (_moved(-2, -2), f"{NORM} must begin at byte "),
        (_moved(2, 2), "must begin at byte "),
        (lambda header: header.pop(NORM), "must begin at byte "),
        (lambda header: header.update(__metadata__={"format": 1}), f"{SHARD} must have __metadata"),
        (lambda header: header.update(__metadata__=[]), f"{SHARD} must have __metadata__ of texts"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(small, change, message):
    header, data = header_of(small / SHARD)
    change(header)
    write_header(small / SHARD, header, data)
    assert message in refused(small)


def test_a_name_is_there_once(small):
    """A name must be unique in a header, and over all shards."""
    header, data = header_of(small / SHARD)
    text = json.dumps(header).encode()
    write_header(small / SHARD, text[:-1] + b"," + text[1:], data)
    assert "must be JSON, got a name that is there twice. " in refused(small)
    write_header(small / SHARD, header, data)
    changed(small, NORM, torch.zeros(128, dtype=torch.bfloat16))
    second = small / SHARD.replace("1-of", "2-of")
    header, data = header_of(second)
    header[NORM] = {"dtype": "BF16", "shape": [0], "data_offsets": [len(data)] * 2}
    write_header(second, header, data)
    assert f"{NORM} must be in one shard, got {SHARD} and {second.name}. " in refused(small)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {}}, "must hold metadata, got none. "),
        ({"weight_map": [], "metadata": {}}, "must hold a weight_map, got none. "),
        ({"weight_map": {"a": None}, "metadata": {}}, "must name the file of a, got NoneType. "),
        ({"weight_map": {"a": ["b"]}, "metadata": {}}, "must name the file of a, got list. "),
        ({"weight_map": {"a": "../b"}, "metadata": {}}, "hold every shard of its index, got no .."),
        ({"weight_map": {"a": "\0"}, "metadata": {}}, "hold every shard of its index, got no \0"),
        ({"weight_map": {"a": "x" * 999}, "metadata": {}}, "hold every shard of its index, got no"),
        ({"weight_map": {"a": "."}, "metadata": {}}, "hold every shard of its index, got no .. "),
    ],
)
def test_an_index_of_other_content_is_refused(small, index, message):
    (small / INDEX).write_text(json.dumps(index))
    assert message in refused(small)


def test_one_file_needs_no_index(small):
    """Hugging Face loads this file even if there is an index."""
    held = dict(tensors(small))
    num_bytes = check_checkpoint(small).num_bytes
    for file in small.glob("model*"):
        file.unlink()
    save_file(held, small / "model.safetensors")
    (small / INDEX).write_text("{}")
    assert check_checkpoint(small)[:2] == (len(held), num_bytes)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """Write a checkpoint in one file; tests replace its parts."""
    path = write_checkpoint(tmp_path_factory.mktemp("fuzzed"), SMALL, shards=1)
    (path / "model-00001-of-00001.safetensors").rename(path / "model.safetensors")
    (path / INDEX).unlink()
    return path


def accepts_all(path):
    accepts(partial(checkpoint.draft_tensors, op="load_mtp"), path, "load_mtp")
    return accepts(check_checkpoint, path)


@st.composite
def contradictory(draw, header):
    """Sample a plausible but wrong header: offsets move, together or alone, or a dtype or shape
    changes. Return the header, and the number of bytes to append to the data."""
    header = json.loads(json.dumps(header))
    names = [name for name in header if name != "__metadata__"]
    names.sort(key=lambda name: header[name]["data_offsets"])
    at, by = draw(st.integers(0, len(names) - 2)), draw(st.sampled_from((-4, -1, 1, 4)))
    one, after = header[names[at]], header[names[at + 1]]
    change = draw(st.sampled_from(("border", "hole", "swap", "dtype", "shape", "draft")))
    if change == "border":
        one["data_offsets"][1] += by
        after["data_offsets"][0] += by
    elif change == "hole":
        for name in names[at + 1 :]:
            header[name]["data_offsets"] = [each + abs(by) for each in header[name]["data_offsets"]]
        return header, abs(by)
    elif change == "swap":
        one["data_offsets"], after["data_offsets"] = after["data_offsets"], one["data_offsets"]
    elif change == "dtype":
        one["dtype"] = draw(st.sampled_from(("F32", "I8", "U8", "F8_E5M2", "F4", "X")) | st.text())
    elif change == "shape":
        one["shape"] = draw(st.permutations(one["shape"]) | st.lists(NUMBERS, max_size=3))
    else:  # DSpark's drafts have names and shapes that do not follow from a config
        shape, size = [draw(st.integers(0, 9))], draw(st.integers(0, 5))
        stop = header[names[-1]]["data_offsets"][1]
        added = {"dtype": "F4", "shape": shape, "data_offsets": [stop, stop + size]}
        header["mtp.0.main_proj.weight"] = added
        return header, size
    return header, 0


@given(data=st.data())
@settings(max_examples=100 if NIGHTLY else 25, deadline=None)
def test_any_header_is_accepted_or_refused_clearly(fuzzed, data):
    """safetensors reads an accepted header in the same way."""
    file = fuzzed / "model.safetensors"
    header, weights = header_of(file)
    any_change = mutated(header).map(lambda made: (made, 0))
    changed, added = data.draw(any_change | contradictory(header))
    with restored(file):
        write_header(file, changed, weights + bytes(added))
        if not accepts_all(fuzzed):
            return
        with safe_open(file, framework="pt") as opened:
            assert {*opened.keys()} == changed.keys() - {"__metadata__"}
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                assert part.get_dtype() == changed[name]["dtype"]
                assert part.get_shape() == changed[name]["shape"]


@given(data=st.data())
@settings(max_examples=100 if NIGHTLY else 25, deadline=None)
def test_any_bytes_of_a_header_and_any_config_are_accepted_or_refused_clearly(fuzzed, data):
    with restored(fuzzed / "model.safetensors") as whole:
        stop = 8 + int.from_bytes(whole[:8], "little")
        at = data.draw(st.integers(0, 12) | st.integers(0, stop))
        length = data.draw(st.integers(0, 6))
        content = whole[:at] + data.draw(st.binary(max_size=6)) + whole[at + length :]
        (fuzzed / "model.safetensors").write_bytes(content)
        accepts_all(fuzzed)
    with restored(fuzzed / "config.json") as whole:
        (fuzzed / "config.json").write_text(json.dumps(data.draw(mutated(json.loads(whole)))))
        accepts_all(fuzzed)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' * 100_000, '{"\\ud800": 1}'])
def test_texts_that_parsers_choke_on_are_refused(fuzzed, content):
    text = content.encode()
    sizes = ("config.json", b""), ("model.safetensors", len(text).to_bytes(8, "little"))
    for name, size in sizes:
        with restored(fuzzed / name):
            (fuzzed / name).write_bytes(size + text)
            assert f"{name} must be JSON, got " in refused(fuzzed)


def test_a_path_is_one():
    with pytest.raises(TypeError, match=r"^check_checkpoint: path must be a str or a path, "):
        check_checkpoint(3)


@pytest.mark.parametrize(
    ("changed_config", "rule"),
    [
        ({"expert_dtype": "fp8"}, "expert_dtype must be 'fp4' for experts of I8, got 'fp8'. "),
        ({"quantization_config": {**SMALL["quantization_config"], "scale_fmt": "float"}},
         "quantization_config.scale_fmt must be 'ue8m0' for experts in FP4, got 'float'. "),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_its_experts_is_refused(small, changed_config, rule):
    (small / "config.json").write_text(json.dumps({**SMALL, **changed_config}))
    assert refused(small) == f"check_checkpoint: {rule}Correct config.json."


def test_a_draft_of_dspark_is_recognised(small):
    changed(small, "mtp.0.main_proj.weight", torch.ones(1))
    assert check_checkpoint(small).draft == "dspark"


def test_the_command_line_writes_and_checks(tmp_path, capsys):
    folder = str(tmp_path / "tiny")
    assert main(["checkpoint", folder, "--shards", "2"]) == 0
    assert "427 tensors" in capsys.readouterr().out
    assert check_checkpoint(folder).num_tensors == 427
    before = {path: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    assert main(["checkpoint", folder, "--seed", "1"]) == 1  # --check was forgotten
    assert "checkpoint: DIR must hold no checkpoint to write over" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    assert main(["checkpoint", folder, "--check"]) == 0
    assert "fp4 experts" in capsys.readouterr().out
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps({**TINY, "model_type": "deepseek_v41"}))
    assert main(["checkpoint", folder, "--check"]) == 1
    assert "check_checkpoint: config.model_type must be one of deep" in capsys.readouterr().err
    config.unlink()
    assert main(["checkpoint", folder, "--check"]) == 1
    assert "check_checkpoint: path must hold config.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["v3", "v32", "v2", "glm5"])
def test_the_command_line_writes_other_models(name, tmp_path, capsys):
    """Layers are codes, and a text continues with bytes."""
    transformers = pytest.importorskip("transformers", "5.17", reason="needs deepseek_v32")
    from dsv4_ops.integrations import transformers as v4
    from dsv4_ops.testing.mla_checkpoint import write_mla_checkpoint

    folder = str(tmp_path / name)
    with pytest.raises(ValueError, match="model must be 'v2' or 'v3' or 'v32' or 'glm5', got 'v9'"):
        write_mla_checkpoint(folder, "v9")
    assert main(["checkpoint", folder, "--model", name, "--family", "base"]) == 1
    assert "--family must be left out with other models than v4" in capsys.readouterr().err
    assert main(["checkpoint", folder, "--model", name, "--shards", "2"]) == 0
    assert "fp8 experts, scales F32" in capsys.readouterr().out
    model = v4.patch(v4.load_quantized(folder))
    assert model.model.layers[1].self_attn.o_proj.weight.dtype == torch.float8_e4m3fn
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("one", return_tensors="pt").input_ids
    texts = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert texts.shape == (1, ids.shape[1] + 4)
    assert tokenizer.decode(texts[0]).startswith("<s>one")


def test_given_weights_are_quantised_and_the_rest_is_random(tmp_path):
    """1.5 is a code of both formats; 3 * 2^-20 needs their scales."""
    fp8, fp4 = "layers.0.attn.wq_a.weight", "layers.0.ffn.experts.1.w2.weight"
    given = {
        fp8: torch.full((128, 128), 1.5),
        fp4: torch.full((128, 128), 3 * 2.0**-20),
        "layers.0.attn.attn_sink": torch.tensor([0.25, -7.0]),
    }
    files = dict(tensors(write_checkpoint(tmp_path / "given", SMALL, weights=given)))
    assert files["layers.0.attn.attn_sink"].tolist() == [0.25, -7.0]
    scale = files[fp8.replace("weight", "scale")]
    assert block_values(files[fp8], scale, 128, 128).unique().tolist() == [1.5]
    scale = files[fp4.replace("weight", "scale")]
    assert fp4_values(files[fp4], scale).unique().tolist() == [3 * 2.0**-20]
    random = dict(tensors(write_checkpoint(tmp_path / "random", SMALL)))
    same = [equal(files[name], random[name]) for name in files]
    assert sum(same) == len(random) - 5  # two weights with scales, and the sink


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.7.attn_norm.weight", "have names of config.json's tensors, got layers.7.attn"),
        ("norm.weight", r"have shape \(128,\) for norm.weight, got \(3,\)"),
        ("layers.0.ffn.experts.0.w1.weight", r"have shape \(128, 128\) for .*, got \(3,\)"),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_is_written(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "none", SMALL, weights={name: torch.zeros(3)})
    assert not (tmp_path / "none").exists()
