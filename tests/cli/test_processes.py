"""What only a process of its own shows: interruption, memory, what is imported, and that the network is never asked."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cli.running import change_json, replace, stderr_lines
from PIL import Image
from safetensors.torch import save_file

from qwen21.__main__ import _parser
from qwen21.checkpoint import Checkpoint, meta_parameters
from qwen21.transformer import QwenImage21Transformer

ROOT = Path(__file__).parents[2]
# A shell's background jobs ignore SIGINT, and so would this; a person's terminal does not.
COMMAND = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); runpy.run_module('qwen21', run_name='__main__')"


def python(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code", "long"),
    [
        (signal.SIGINT, 130, ("--steps", 10000)),
        (signal.SIGINT, 130, ("--steps", 2, "--batch", 10000)),
        (signal.SIGTERM, 143, ("--steps", 2, "--batch", 10000)),
    ],
    ids=["stop one", "stop batch", "terminate batch"],
)
def test_an_interruption_leaves_whole_pictures_only(model_folder, tmp_path, number, code, long):
    process = python(COMMAND, "generate", "a cat", "--model", model_folder, "-o", tmp_path / "out.png", "--width", 64, "--height", 64, *long)
    if "--batch" in long:
        while not (tmp_path / "out-1.png").exists() and process.poll() is None:
            time.sleep(0.01)
        stderr = ""
    else:
        stderr = process.stderr.read(300)  # some way into the bar
    process.send_signal(number)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert stderr_lines(stderr + rest) == (["interrupted: nothing was left half-written"] if number == signal.SIGINT else [])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert all(name.startswith("out-") for name in names) and bool(names) == ("--batch" in long)
    for name in names:
        with Image.open(tmp_path / name) as picture:
            picture.load()


@pytest.mark.parametrize("arguments", [("inspect", "tiny"), ("inspect", "tiny", "--json"), ("--help",)], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_reads_the_output(arguments, unbuffered):
    """As with `| head`, which leaves when it has enough."""
    reader, writer = os.pipe()
    os.close(reader)
    command, environment = [sys.executable, "-m", "qwen21", *arguments], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141 if unbuffered and arguments[0] == "inspect" else 0, "")


MEASURE = """
import sys, threading, time
import torch
from qwen21.checkpoint import Checkpoint

def private():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

checkpoint = Checkpoint(sys.argv[1])
before, peak, done = private(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, private())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
model = checkpoint.transformer(torch.device("cpu"), torch.bfloat16)
done = True
watcher.join()
print((peak - before) / sum(weight.nbytes for weight in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured as Linux reports it")
def test_loading_float32_as_bfloat16_holds_no_second_copy(damaged):
    change_json(damaged / "transformer/config.json", num_attention_heads=32, num_layers=4)
    with meta_parameters():
        model = QwenImage21Transformer(Checkpoint(damaged).transformer_config)
    weights = damaged / "transformer/diffusion_pytorch_model.safetensors"
    weights.unlink()
    save_file({name: torch.zeros(weight.shape) for name, weight in model.named_parameters()}, weights)
    assert weights.stat().st_size > 2e8
    stdout, stderr = python(MEASURE, damaged).communicate(timeout=120)
    assert 0.9 < float(stdout) < 1.5, stderr


def test_help_is_quick_and_complete():
    code = "import sys; from qwen21.__main__ import main\ntry: main(['generate', '--help'])\nfinally: assert 'torch' not in sys.modules and 'PIL' not in sys.modules"
    process = python(code)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    commands = next(action for action in _parser()._actions if action.dest == "command").choices
    assert commands.keys() == {"generate", "batch", "inspect", "make-random"}
    for action in (action for parser in commands.values() for action in parser._actions):
        assert action.help and all(option in stdout for option in action.option_strings if action in commands["generate"]._actions)


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to reach a host fails the test."""
    calls = []

    def refuse(*arguments, **_):
        calls.append(arguments)
        raise OSError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_"))]:
        monkeypatch.delenv(name)
    yield
    assert not calls


def test_the_network_is_never_asked(paint, damaged, tmp_path, monkeypatch, no_network):
    """Also with a relative folder, whose parts look like names of repositories, and with parts missing."""
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    options = ["--image", "a.png", "--cfg", 2]
    assert paint(*options, model="damaged").code == 0
    for name in ("processor/preprocessor_config.json", "processor/tokenizer.json", "text_encoder/config.json"):
        (damaged / name).unlink()
        paint(*options, model="damaged").failed(1)


def test_processor_files_of_other_versions(paint, damaged, tmp_path):
    """transformers 5 may nest the picture processor in `processor_config.json`; older ones name its limits `min_pixels` and `max_pixels`."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    path = damaged / "processor/preprocessor_config.json"
    config = json.loads(path.read_text())
    assert dict(Checkpoint(damaged).picture_processor().size).items() >= config["size"].items()
    limits = {"min_pixels": config["size"]["shortest_edge"], "max_pixels": config["size"]["longest_edge"]}
    written = []
    for file, content in [
        (path, config),
        (path, {key: value for key, value in config.items() if key != "size"} | limits),
        (path.with_name("processor_config.json"), {"processor_class": "Qwen3VLProcessor", "image_processor": config}),
    ]:
        path.unlink(missing_ok=True)
        replace(file, content)
        run = paint("--image", tmp_path / "a.png", model=damaged)
        assert (run.code, run.lines) == (0, [])
        written.append(paint.output.read_bytes())
    assert written[0] == written[1] == written[2]
