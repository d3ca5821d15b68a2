"""Damaged and absurd LoRA files: a sentence, and nothing else."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from unit.lora_files import random_factors, spelled

from qwen21.errors import Qwen21Error
from qwen21.lora import LoraFile, attach, places
from qwen21.lora.file import ENDINGS, METADATA

fuzz = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def known(transformer):
    return places(transformer)


def opened(path, content: bytes, known) -> None:
    """Reads `content` as a LoRA file: it fits, or one clear line says why not."""
    path.write_bytes(content)
    try:
        LoraFile.read(path).fit(known)
    except Qwen21Error as error:
        assert "\n" not in str(error) and len(str(error)) < 2000


@fuzz
@given(data=st.data())
def test_bytes_changed_and_cut(data, transformer, known, tmp_path):
    content = bytearray(save(spelled(random_factors(transformer, ("img_in",)), "{}.lora_A.weight", "{}.lora_B.weight"), {METADATA: json.dumps({"r": 4})}))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, min(len(content) - 1, 400)))] = data.draw(st.integers(0, 255))
    opened(tmp_path / "a.safetensors", bytes(content[: data.draw(st.integers(0, len(content)))]), known)


@fuzz
@given(length=st.integers(0, 2**64 - 1), header=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_headers(length, header, known, tmp_path_factory):
    opened(tmp_path_factory.getbasetemp() / "header.safetensors", struct.pack("<Q", length) + header, known)
    opened(tmp_path_factory.getbasetemp() / "header.safetensors", struct.pack("<Q", len(header)) + header, known)


layers = st.one_of(
    st.sampled_from(["img_in", "transformer_blocks.0.img_mlp.gate_up", "transformer_blocks.1.attn.norm_q", "lora_unet_transformer_blocks_0_attn_to_q"]),
    st.text("abc._0", max_size=8),
)
roles = st.sampled_from([ending for endings in ENDINGS.values() for ending in endings] + ["diff_b", "lora_mid", "hada_t1", "reshape_weight", ""])
keys = st.builds("{}.{}{}".format, layers, roles, st.sampled_from(["", ".weight", ".default.weight", ".bias"]))
shapes = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, 4, 64]), max_size=4), st.sampled_from([[256, 4], [4, 256], [4, 64], [256, 64], [1536, 2], [32, 8, 8], [2, 32, 8, 8]])
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.int64])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=5)), lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
configs = st.dictionaries(st.sampled_from(["lora_alpha", "transformer.lora_alpha", "alpha_pattern", "use_rslora", "r"]), values, max_size=4)


@fuzz
@given(tensors=st.dictionaries(keys, st.tuples(shapes, dtypes), max_size=6), config=st.one_of(st.none(), configs.map(json.dumps), st.text(max_size=20)))
def test_tensors_of_any_name_shape_and_type(tensors, config, known, tmp_path_factory):
    content = save({name: torch.ones(shape).to(dtype) for name, (shape, dtype) in tensors.items()}, None if config is None else {METADATA: config})
    opened(tmp_path_factory.getbasetemp() / "tensors.safetensors", content, known)


@fuzz
@given(layer=st.sampled_from(["transformer_blocks.0.img_mlp.gate_up", "transformer_blocks.0.attn.to_q", "img_in", "txt_in.text_norm"]), data=st.data())
def test_what_is_taken_can_be_applied(layer, data, transformer, known, tmp_path_factory):
    """A file that was not refused works: whatever was missed when reading would show here."""
    out, *rest = known[layer.replace(".", "_")].shape
    sizes = st.sampled_from([1, 2, 4, 8, out, out // 2, *rest, *(one // 2 for one in rest)])
    turns = st.sampled_from([[times, out // size, size, size] for times in (1, 2, 9) for size in (1, 2, 8)])
    made = st.dictionaries(roles, st.one_of(st.lists(sizes, max_size=3), turns), min_size=1, max_size=5)
    tensors = {f"{layer}.{role}": torch.ones(shape) for role, shape in data.draw(made).items()}
    path = tmp_path_factory.getbasetemp() / "taken.safetensors"
    path.write_bytes(save(tensors))
    try:
        lora = LoraFile.read(path).fit(known)
    except Qwen21Error:
        return
    before = {name: weight.clone() for name, weight in transformer.state_dict().items()}
    with attach(transformer, [(lora, 0.5)]):
        pass
    assert all(torch.equal(weight, before[name]) for name, weight in transformer.state_dict().items())


def test_a_tensor_larger_than_its_file_is_not_allocated(known, tmp_path):
    header = json.dumps({"img_in.lora_A.weight": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(Qwen21Error, match="damaged or truncated"):
        LoraFile.read(path)


def test_factors_of_a_huge_product_are_refused_by_their_shape(known, tmp_path):
    """Kronecker factors of 64 MB would make 4 TB."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(save({"img_in.lokr_w1": torch.ones(4096, 256), "img_in.lokr_w2": torch.ones(4096, 256)}))
    with pytest.raises(Qwen21Error, match="has shape"):
        LoraFile.read(path).fit(known)
