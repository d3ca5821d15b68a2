"""Checkpoint folders in the diffusers layout: what is in them, and their parts as loaded modules.

Modules are built with parameters on the meta device and receive each tensor straight from its file, on the target device and in the
target dtype: nothing is initialised first and no second copy is held. Only safetensors are read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3VLConfig

from .config import ModelIndex, ScheduleConfig, TransformerConfig, VAEConfig, read_json
from .errors import Qwen21Error
from .text_encoder import PictureProcessor, Qwen3VLModel, TextEncoder
from .transformer import QwenImage21Transformer
from .vae import QwenImage21VAE

TEMPLATE_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


PARTS = ("text_encoder", "transformer", "vae")
QUANTIZATION = ("comfy_quant", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")  # what ComfyUI stores beside a weight
TINY = "tiny"  # the name of the checkpoint that comes with the package
TINY_FOLDER = Path(__file__).parent / "tiny" / "model"


class Checkpoint:
    """A Qwen-Image 2.1 folder, or "tiny" for the built-in one: `model_index.json`, `transformer/`, `text_encoder/`, `vae/`, `scheduler/`, `processor/`.

    Opening it reads and checks the configs and the headers of the weight files. Raises Qwen21Error if a part is missing, is another
    model's, or does not fit the others.
    """

    def __init__(self, folder: str | Path):
        self.folder = TINY_FOLDER if folder == TINY else Path(folder)
        if not self.folder.is_dir():
            raise Qwen21Error(f"the model {folder} is not a folder: give a Qwen-Image 2.1 folder in the diffusers layout")
        self.index = ModelIndex.from_dict(*self._config("model_index.json"))
        self.transformer_config = TransformerConfig.from_dict(*self._config("transformer/config.json"))
        self.vae_config = VAEConfig.from_dict(*self._config("vae/config.json"))
        self.schedule = ScheduleConfig.from_dict(*self._config("scheduler/scheduler_config.json"))
        self._encoder_config, source = self._config("text_encoder/config.json")
        self._check_fit(source)
        preview = self.folder / "latent_rgb_factors.json"
        self.preview_factors: dict | None = read_json(preview) if preview.is_file() else None  # "factors" (64, 3) and "bias" (3), if it brings its own
        for part in PARTS:
            for path in sorted(set(weight_files(self.folder / part).values())):
                with open_safetensors(path):  # a truncated file shows here, not after the parts before it have run
                    pass

    @property
    def name(self) -> str:
        """What to call it in records."""
        return TINY if self.folder == TINY_FOLDER else self.folder.resolve().name

    def transformer(self, device: torch.device, dtype: torch.dtype) -> QwenImage21Transformer:
        """The denoiser, in eval mode without gradients."""
        with meta_parameters():
            model = QwenImage21Transformer(self.transformer_config)
        return self._fill(model, "transformer", device, dtype)

    def vae(self, device: torch.device, dtype: torch.dtype) -> QwenImage21VAE:
        """The autoencoder, in eval mode without gradients."""
        with meta_parameters():
            model = QwenImage21VAE(self.vae_config)
        return self._fill(model, "vae", device, dtype)

    def text_encoder(self, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        """Qwen3-VL without its language head, with tokenizer and picture processor."""
        config = self.encoder_config()
        with _explained(f"{self.folder / 'text_encoder/config.json'}"), meta_parameters():
            model = Qwen3VLModel(config)
        encoder = TextEncoder(model, self.tokenizer(), self.picture_processor(), device, dtype)
        self._fill(model, "text_encoder", device, dtype)
        return encoder

    def weights(self, part: str, module: nn.Module, device: torch.device | str = "cpu", quantized: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """`read_weights` of one part ("transformer", "vae" or "text_encoder") with what is special about its files: of the VAE, Conv3d
        weights of temporal size 1 lose that axis and the unused `time_conv` is skipped; of the encoder, head and final norm are."""
        return read_weights(module, self.folder / part, device, _RENAME.get(part, str), squeeze=part == "vae", quantized=quantized)

    def file_bytes(self, part: str) -> int:
        """Size of a part's weights on disk."""
        return sum(path.stat().st_size for path in set(weight_files(self.folder / part).values()))

    def encoder_config(self) -> Qwen3VLConfig:
        """transformers' config of the text encoder, with PyTorch's own attention."""
        with _explained(f"{self.folder / 'text_encoder/config.json'}"):
            config = Qwen3VLConfig.from_dict(_both_rope_spellings(self._encoder_config))
            config._attn_implementation = "sdpa"
        return config

    def picture_processor(self) -> PictureProcessor:
        """What turns pictures into the vision tower's patches. Raises Qwen21Error if it is damaged or made for another tower."""
        folder = self.folder / "processor"
        one_of = [path for path in (folder / "processor_config.json", folder / "preprocessor_config.json") if path.is_file()]
        if not one_of:
            raise Qwen21Error(f"{folder / 'preprocessor_config.json'} is missing: take the processor folder of a Qwen-Image 2.1 checkpoint")
        for path in one_of:
            read_json(path)
        with _explained(f"the picture processor in {folder}"):
            values, _ = PictureProcessor.get_image_processor_dict(folder, local_files_only=True)
            limits = values.get("size", {})  # which transformers 4.57 forgets, unless it is told in the older words
            processor = PictureProcessor.from_dict({"min_pixels": limits.get("shortest_edge"), "max_pixels": limits.get("longest_edge")} | values)
            smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
        if not isinstance(smallest, int) or not isinstance(largest, int) or not 0 < smallest <= largest:
            raise Qwen21Error(f"the picture processor in {folder} has a `size` of {smallest} to {largest} pixels, expected a range: download it again")
        tower = self.encoder_config().vision_config
        for ours, theirs in (("patch_size", "patch_size"), ("temporal_patch_size", "temporal_patch_size"), ("merge_size", "spatial_merge_size")):
            found, expected = getattr(processor, ours), getattr(tower, theirs)
            if found != expected:
                raise Qwen21Error(
                    f"the picture processor in {folder} has `{ours}` {found}, the text encoder {expected}: the two come from different checkpoints"
                )
        return processor

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises Qwen21Error if it is damaged, or not the one the text encoder was trained with."""
        folder = self.folder / "processor"
        with _explained(f"the tokenizer in {folder}"):
            tokenizer = _read_tokenizer(folder)
        for token in TEMPLATE_TOKENS:
            if tokenizer.token_to_id(token) is None:
                raise Qwen21Error(f"the tokenizer in {folder} lacks the token {token}: take the processor folder of a Qwen-Image 2.1 checkpoint")
        known, words = tokenizer.get_vocab_size(with_added_tokens=True), self.encoder_config().text_config.vocab_size
        if known > words:
            raise Qwen21Error(f"the tokenizer in {folder} has {known} tokens, the text encoder {words}: the two come from different checkpoints")
        return tokenizer

    def _fill(self, module: nn.Module, part: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Give `module`, built under `meta_parameters`, its weights on `device`."""
        for name, tensor in self.weights(part, module, device):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor.to(device, dtype), requires_grad=False))
        return module.to(device).eval()  # .to: buffers; the parameters are there

    def _config(self, name: str) -> tuple[dict, str]:
        path = self.folder / name
        return read_json(path), str(path)

    def _check_fit(self, source: str) -> None:
        kind = self._encoder_config.get("model_type")
        if kind != "qwen3_vl":
            raise Qwen21Error(f"{source}: `model_type` is {kind!r}, expected 'qwen3_vl': take the text_encoder folder of a Qwen-Image 2.1 checkpoint")
        for key in ("text_config", "vision_config"):
            if not isinstance(self._encoder_config.get(key), dict):
                raise Qwen21Error(f"{source}: `{key}` is {self._encoder_config.get(key)!r}, expected an object: download the file again")
        width, wanted = self.encoder_config().text_config.hidden_size, self.transformer_config.context_in_dim
        if width != wanted:
            raise Qwen21Error(
                f"{source}: `hidden_size` is {width}, the denoiser expects a text encoder of width {wanted}: the two come from different checkpoints"
            )
        if self.vae_config.z_dim != self.transformer_config.in_channels:
            raise Qwen21Error(
                f"{self.folder}: the VAE has {self.vae_config.z_dim} latent channels, the denoiser takes {self.transformer_config.in_channels}: "
                "the two come from different checkpoints"
            )


def _read_tokenizer(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if (folder / "vocab.json").is_file():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).backend_tokenizer
    raise Qwen21Error(f"{folder / 'tokenizer.json'} is missing: take the processor folder of a Qwen-Image 2.1 checkpoint")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Whatever transformers and tokenizers raise inside on a damaged file, as a sentence about `what`."""
    try:
        yield
    except Qwen21Error:
        raise
    except Exception as error:
        raise Qwen21Error(f"{what} cannot be used ({_one_line(error)}): download it again") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside get their parameters on the meta device; buffers, such as rotary frequencies, stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter if parameter is None else nn.Parameter(parameter.detach().to("meta"), requires_grad=False))

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def weight_files(folder: Path) -> dict[str, Path]:
    """Which file of `folder` holds which tensor: from a `*.safetensors.index.json`, or of the single safetensors file there."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise Qwen21Error(f"{folder} holds {len(indexes)} indexes ({', '.join(path.name for path in indexes)}), expected one: leave only the variant to use")
    if indexes:
        names = read_json(indexes[0]).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) and file.endswith(".safetensors") for file in names.values()):
            raise Qwen21Error(f"{indexes[0]}: `weight_map` does not give a safetensors file for each tensor: download the file again")
        for file in sorted(set(names.values())):
            if not (folder / file).is_file():
                raise Qwen21Error(f"{folder / file} is missing: {indexes[0].name} lists it, download it again")
        return {name: folder / file for name, file in names.items()}
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        found = f"only {', '.join(others)}" if others and not files else f"{len(files)} safetensors files and no index"
        raise Qwen21Error(f"{folder} holds {found}, expected one safetensors file or shards with their index: download the folder again")
    with open_safetensors(files[0]) as file:
        return {name: files[0] for name in file.keys()}


@contextmanager
def open_safetensors(path: Path, device: torch.device | str = "cpu"):
    """safetensors.safe_open whose errors name the file."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise Qwen21Error(f"{path} is damaged or truncated ({_one_line(error)}): download it again") from None


def read_weights(
    module: nn.Module,
    folder: Path,
    device: torch.device | str = "cpu",
    rename: Callable[[str], str | None] = str,
    squeeze: bool = False,
    quantized: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in `module`, tensor in the file's dtype) for every parameter of `module`, read from the safetensors in `folder` one by one.

    `rename` maps a tensor's name in the file to the module's (None: not used). With `squeeze`, axes of size 1 may differ. With `quantized`,
    what ComfyUI stores beside a quantised weight (QUANTIZATION) is given as well, and such a weight may have a packed shape.
    Raises Qwen21Error that names the tensor if one is missing, unknown, or of another shape.
    """
    parameters = dict(module.named_parameters())
    waiting = dict(parameters)
    by_file: dict[Path, list[str]] = {}
    for name, path in weight_files(folder).items():
        by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        with open_safetensors(path, device) as file:
            missing = set(names) - set(file.keys())
            if missing:
                raise Qwen21Error(f"{path} lacks the tensor {min(missing)} that the index lists: download it again")
            for name in names:
                target = rename(name)
                if target is None:
                    continue
                layer, _, kind = target.rpartition(".")
                if kind in QUANTIZATION and f"{layer}.weight" in parameters:
                    if not quantized:
                        raise Qwen21Error(f"{path} is quantised for ComfyUI (it holds {name}): load it with the nodes, or take the unquantised checkpoint")
                    yield target, file.get_tensor(name)
                    continue
                if target not in waiting:
                    what = type(module).__name__
                    raise Qwen21Error(
                        f"{path} holds the tensor {name}, which the {what} of its config.json has not: it is another model's, take the file from a "
                        "Qwen-Image 2.1 checkpoint"
                    )
                found, expected = tuple(file.get_slice(name).get_shape()), tuple(waiting.pop(target).shape)
                if f"{name.rpartition('.')[0]}.comfy_quant" in names:
                    yield target, file.get_tensor(name)
                    continue
                if found != expected and not (squeeze and _without_ones(found) == _without_ones(expected)):
                    raise Qwen21Error(
                        f"{path}: tensor {name} has shape {found}, the config asks for {expected}: weights and config.json come from different models"
                    )
                yield target, file.get_tensor(name).reshape(expected)
    if waiting:
        raise Qwen21Error(f"{folder} lacks {len(waiting)} of {len(parameters)} tensors, the first is {min(waiting)}: download the folder again")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _encoder_name(name: str) -> str | None:
    """A tensor's name in a Qwen3-VL file to that in Qwen3VLModel. The head and the final norm are not used."""
    name = name.removeprefix("model.")
    return None if name in ("lm_head.weight", "language_model.norm.weight") else name


def _both_rope_spellings(config: dict) -> dict:
    """transformers 5 writes `rope_parameters`, 4.57 reads `rope_theta` and `rope_scaling`: give whichever is missing."""
    text = dict(config["text_config"])
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        text.setdefault("rope_theta", rope["rope_theta"])
        text.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    return config | {"text_config": text}


def _vae_name(name: str) -> str | None:
    return None if ".time_conv." in name else name


_RENAME = {"vae": _vae_name, "text_encoder": _encoder_name}
