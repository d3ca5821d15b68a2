"""Files cut short, with bytes changed, or with headers that lie: one sentence, at once, in little memory."""

import json
import re
import resource
import struct
import time
from pathlib import Path

import pytest
import torch
from formats import files
from formats.files import FILES, load
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from qwen21.checkpoint import Checkpoint
from qwen21.describe import describe, table
from qwen21.errors import Qwen21Error

CPU = torch.device("cpu")
PATIENCE, MEMORY = 30, 300e6  # seconds and bytes that no file of a few MB may take


def opened(small: Path, part: str, path: Path) -> str | None:
    """Load the part from `path` and describe it; the sentence it is refused with. Anything else that is raised is a failure."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    message = None
    try:
        getattr(Checkpoint(small, tokenizer=small / "processor", **{part: path}), part)(CPU, torch.float32)
    except Qwen21Error as error:
        message = str(error)
    told = describe(path)
    table(told)
    json.dumps(told)
    assert time.perf_counter() - started < PATIENCE and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MEMORY
    assert message is None or ("\n" not in message and str(path) in message and message.count(": ") >= 1 and len(message) < 600), message
    return message


class Contents(dict):
    """Does not print what it holds."""

    def __repr__(self) -> str:
        return "Contents"


@pytest.fixture(scope="session")
def contents(small, tmp_path_factory) -> Contents:
    """Intact files: a part's name -> safetensors, and "gguf"."""
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("contents") / "x.gguf"
    packed, _ = files.quantized_gguf(load(small, "transformer"), ["Q8_0", "Q4_K"])
    files.write_gguf(path, packed, general__name="a name", comfy__gguf__note="something")
    return Contents({part: (small / file).read_bytes() for part, file in FILES.items()} | {"gguf": path.read_bytes()})


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """`place(content, kind)` -> (part, file with that content)."""
    folder = tmp_path_factory.mktemp("damaged")

    def write(content: bytes, kind: str) -> tuple[str, Path]:
        path = folder / ("x.gguf" if kind == "gguf" else "x.safetensors")
        path.unlink(missing_ok=True)  # what was read from it before may still be mapped
        path.write_bytes(content)
        return ("transformer" if kind == "gguf" else kind), path

    return write


KINDS = st.sampled_from(["transformer", "text_encoder", "vae", "gguf"])


@given(kind=KINDS, share=st.floats(0, 1))
def test_cut_short(small, contents, place, kind, share):
    content = contents[kind]
    part, path = place(content[: int(share * (len(content) - 1))], kind)
    assert "damaged or truncated" in opened(small, part, path)


@given(kind=KINDS, length=st.integers(0, 64))
def test_cut_short_within_the_header(small, contents, place, kind, length):
    part, path = place(contents[kind][:length], kind)
    assert "damaged or truncated" in opened(small, part, path)


@given(kind=KINDS, changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_bytes_of_the_header_changed(small, contents, place, kind, changes):
    content = bytearray(contents[kind])
    header = 8 + struct.unpack("<Q", content[:8])[0] if kind != "gguf" else 6000
    for where, value in changes:
        content[int(where * (header - 1))] = value
    opened(small, *place(bytes(content), kind))


@given(kind=KINDS, length=st.integers(0, 4096), data=st.data())
def test_other_bytes_altogether(small, place, kind, length, data):
    content = data.draw(st.binary(max_size=length))
    part, path = place(content, kind)
    assert opened(small, part, path) is not None


@given(
    part=st.sampled_from(sorted(FILES)),
    change=st.sampled_from(["shape", "dtype", "offsets", "name", "gone", "extra"]),
    sizes=st.lists(st.sampled_from([0, 1, 2, 127, 128, 2**31, 2**53]), max_size=5),
    dtype=st.sampled_from(["F32", "BF16", "F8_E4M3", "I8", "U8", "BOOL", "F4", "X"]),
    offsets=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
    data=st.data(),
)
def test_headers_that_lie(small, contents, place, part, change, sizes, dtype, offsets, data):
    content = contents[part]
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    name = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    if change in ("name", "gone", "extra"):
        value = header[name] if change == "extra" else header.pop(name)
        header |= {} if change == "gone" else {f"{name}.{data.draw(st.text(max_size=5))}": value}
    else:
        header[name] |= {"shape": {"shape": sizes}, "dtype": {"dtype": dtype}, "offsets": {"data_offsets": list(offsets)}}[change]
    encoded = json.dumps(header).encode()
    opened(small, *place(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :], part))


NAMES = ["txt_in.text_norm.weight", "img_in.weight", "proj_out.weight", "transformer_blocks.0.attn.norm_q.weight", "transformer_blocks.0.img_mlp.gate_layer.weight",
         "transformer_blocks.0.img_mlp.gate_up.weight", "transformer_blocks.0.attn.to_q.comfy_quant", "transformer_blocks.0.attn.to_q.weight",
         "visual.deepstack_merger_list.0.norm.weight", "model.layers.0.self_attn.q_norm.weight", "visual.patch_embed.proj.weight", "visual.blocks.26.norm1.weight",
         "visual.merger.linear_fc1.weight", "decoder.up_blocks.0.resnets.0.norm1.gamma", "post_quant_conv.weight", "encoder.conv_in.weight", "decoder.norm_out.gamma",
         "encoder.down_blocks.0.resnets.0.conv2.weight", "decoder.upsamples.0.upsamples.0.residual.0.gamma", "scaled_fp8"]  # fmt: skip
TENSORS = st.builds(
    torch.zeros, st.lists(st.sampled_from([0, 1, 2, 64, 128]), max_size=3), dtype=st.sampled_from([torch.float32, torch.uint8, torch.float8_e4m3fn])
)


@given(part=st.sampled_from(sorted(FILES)), tensors=st.dictionaries(st.sampled_from(NAMES), TENSORS, max_size=12))
def test_known_names_over_anything(small, place, part, tensors):
    assert opened(small, *place(save(tensors), part)) is not None


def gguf_header(tensors: int = 0, fields: bytes = b"", count: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + fields


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


LIES = {
    "more tensors than bytes": gguf_header(2**62, count=0),
    "more fields than bytes": gguf_header(count=2**62),
    "a name longer than the file": gguf_header(fields=text(b"x", 2**62)),
    "a text longer than the file": gguf_header(fields=text(b"x") + struct.pack("<I", 8) + text(b"y", 2**40)),
    "an array longer than the file": gguf_header(fields=text(b"x") + struct.pack("<IIQ", 9, 0, 2**40)),
    "an array of arrays of arrays": gguf_header(fields=text(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
    "an array of very many empty arrays": gguf_header(fields=text(b"x") + struct.pack("<IIQ", 9, 9, 2**63) + struct.pack("<IQ", 0, 0) * 100),
    "more dimensions than bytes": gguf_header(1, text(b"x") + struct.pack("<IQIQ", 2**32 - 1, 1, 0, 0), count=0),
    "a tensor larger than the file": gguf_header(1, text(b"x") + struct.pack("<IQIQ", 1, 2**60, 0, 0) + bytes(64), count=0),
    "a size that wraps around": gguf_header(1, text(b"x") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0) + bytes(64), count=0),
    "an unknown type": gguf_header(1, text(b"x") + struct.pack("<IQIQ", 1, 1, 999, 0) + bytes(64), count=0),
    "an old version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "another byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("lie", LIES)
def test_gguf_headers_that_lie(small, place, lie):
    pytest.importorskip("gguf")
    part, path = place(LIES[lie], "gguf")
    assert re.search("damaged or truncated", opened(small, part, path))


@pytest.mark.parametrize("content", [b"<!DOCTYPE html>", b"version https://git-lfs", bytes(100), b"G" * 100, b"\xff\n\r\x00" * 9])
@pytest.mark.parametrize("installed", [True, False])
def test_what_is_only_called_gguf_is_told_by_its_beginning(small, place, monkeypatch, content, installed):
    if not installed:
        monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    part, path = place(content, "gguf")
    assert f"{path} is not GGUF, whatever its name says (it begins with {content[:4]!r})" in opened(small, part, path)


@pytest.mark.parametrize("name", ["x.ckpt", "x.pt", "x.bin", "x"])
def test_pickles_are_never_opened(small, tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(Qwen21Error, match="pickles are never opened"):
        Checkpoint(small, transformer=tmp_path / name)


def test_what_is_not_there_is_named(small, tmp_path):
    with pytest.raises(Qwen21Error, match="absent.safetensors is missing"):
        Checkpoint(small, vae=tmp_path / "absent.safetensors")
    with pytest.raises(Qwen21Error, match="0 safetensors files"):
        Checkpoint(small, vae=tmp_path)
