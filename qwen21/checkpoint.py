"""Checkpoints: a folder in the diffusers layout, single files, or both mixed; and their parts as loaded modules.

Modules are built with parameters on the meta device and receive each tensor straight from its file, on the target device and in the
target dtype: nothing is initialised first and no second copy is held. Only safetensors and GGUF are read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3VLConfig

from .config import PIPELINE, ModelIndex, ScheduleConfig, read_json
from .encoder_files import encoder_config, explained, read_picture_processor, read_tokenizer
from .errors import Qwen21Error
from .inferred import sample_sigmas, transformer_config, vae_config
from .part import Part, open_part
from .schedule import TURBO_SCHEDULE
from .text_encoder import PictureProcessor, Qwen3VLModel, TextEncoder
from .transformer import QwenImage21Transformer
from .vae import QwenImage21VAE

TINY = "tiny"  # the name of the checkpoint that comes with the package
TINY_FOLDER = Path(__file__).parent / "tiny" / "model"


class Checkpoint:
    """Qwen-Image 2.1: a `folder` ("tiny" for the built-in one) with `model_index.json`, `transformer/`, `text_encoder/`, `vae/`, `scheduler/` and
    `processor/`, in which any part may be replaced by another folder or a single file; all three replaced, no folder is needed.

    `tokenizer` is a folder to take the tokenizer from where the text encoder comes without one. Opening reads and checks the configs and the
    headers of the weight files; what configs are missing is inferred. Raises Qwen21Error if a part is missing, is another model's, or does
    not fit the others.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        transformer: str | Path | None = None,
        text_encoder: str | Path | None = None,
        vae: str | Path | None = None,
        tokenizer: Path | None = None,
    ):
        own = {"transformer": transformer, "text_encoder": text_encoder, "vae": vae}
        own = {part: TINY_FOLDER if source == TINY else source for part, source in own.items()}
        if folder is None and None in own.values():
            missing = next(part for part, source in own.items() if source is None)
            raise Qwen21Error(f"there is no {missing}: name a Qwen-Image 2.1 folder, or a file for the {missing} too")
        self.folder = TINY_FOLDER if folder == TINY else None if folder is None else Path(folder)
        if self.folder is not None and not self.folder.is_dir():
            raise Qwen21Error(f"the model {folder} is not a folder: give a Qwen-Image 2.1 folder in the diffusers layout, and single files part by part")
        self._tokenizer = tokenizer
        self.index, self.schedule = ModelIndex(), ScheduleConfig()
        if self.folder is not None:
            self._read_folder(self.folder)
        self.parts: dict[str, Part] = {}
        for name in ("transformer", "vae", "text_encoder"):
            self.parts[name] = open_part(name, Path(own[name]) if own[name] is not None else self.folder)
        self.transformer_config, self.vae_config = transformer_config(self.parts["transformer"]), vae_config(self.parts["vae"])
        if transformer is not None:
            self._read_transformers_own(self.parts["transformer"])
        home = _home(self.parts["vae"])
        preview = home and home / "latent_rgb_factors.json"
        self.preview_factors = read_json(preview) if preview and preview.is_file() else None  # "factors" (64, 3) and "bias" (3), if the VAE brings its own
        self._check_fit()

    def _read_folder(self, folder: Path) -> None:
        path = folder / "model_index.json"
        self.index = ModelIndex.from_dict(read_json(path), str(path))
        path = folder / "scheduler/scheduler_config.json"
        self.schedule = ScheduleConfig.from_dict(read_json(path), str(path))

    @property
    def name(self) -> str:
        """What to call it in records."""
        names = [] if self.folder is None else [TINY if self.folder == TINY_FOLDER else self.folder.resolve().name]
        return "+".join([*names, *(part.source.name for part in self.parts.values() if self.folder is None or self.folder not in part.source.parents)])

    def transformer(self, device: torch.device, dtype: torch.dtype) -> QwenImage21Transformer:
        """The denoiser, in eval mode without gradients. Weights that are stored in fewer bits stay so in memory."""
        return self._filled("transformer", device, dtype)

    def vae(self, device: torch.device, dtype: torch.dtype) -> QwenImage21VAE:
        """The autoencoder, in eval mode without gradients."""
        return self._filled("vae", device, dtype)

    def text_encoder(self, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        """Qwen3-VL without its language head, with tokenizer and picture processor. Weights that are stored in fewer bits stay so in memory."""
        tokenizer, picture_processor = self.tokenizer(), self.picture_processor()
        return TextEncoder(self._filled("text_encoder", device, dtype), tokenizer, picture_processor, device, dtype)

    def _filled(self, name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
        part = self.parts[name]
        return part.fill(meta_module(part), device, dtype)

    def file_bytes(self, part: str) -> int:
        """Size of a part's weights on disk."""
        return self.parts[part].files.file_bytes()

    def encoder_config(self) -> Qwen3VLConfig:
        """transformers' config of the text encoder."""
        return encoder_config(self.parts["text_encoder"])

    def picture_processor(self) -> PictureProcessor:
        """What turns pictures into the vision tower's patches. Raises Qwen21Error if it is damaged or made for another tower."""
        return read_picture_processor(self.parts["text_encoder"], self.encoder_config())

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises Qwen21Error if it is damaged, or not the one the text encoder was trained with."""
        return read_tokenizer(self.parts["text_encoder"], self.encoder_config(), self._tokenizer)

    def _read_transformers_own(self, part: Part) -> None:
        """Which sigmas a denoiser that is not the folder's wants: its own folder knows, or its file says that it is a Turbo.

        Fixed sigmas of the folder are its own denoiser's, which was distilled for them: another one that says nothing follows the published schedule.
        """
        home, own = _home(part), sample_sigmas(part)
        if home is not None:
            self._read_folder(home)
        elif own:
            self.index, self.schedule = replace(self.index, sample_sigmas=own), TURBO_SCHEDULE
        elif self.index.sample_sigmas:
            self.index, self.schedule = replace(self.index, sample_sigmas=()), ScheduleConfig()

    def _check_fit(self) -> None:
        width, wanted = self.encoder_config().text_config.hidden_size, self.transformer_config.context_in_dim
        encoder, denoiser = self.parts["text_encoder"], self.parts["transformer"].source
        if width != wanted:
            source = encoder.config_path if encoder.config is not None else encoder.source
            raise Qwen21Error(
                f"{source}: `hidden_size` is {width}, the denoiser in {denoiser} expects a text encoder of width {wanted}: the two come from different checkpoints"
            )
        if self.vae_config.z_dim != self.transformer_config.in_channels:
            raise Qwen21Error(
                f"{self.parts['vae'].source}: the VAE has {self.vae_config.z_dim} latent channels, the denoiser in {denoiser} takes "
                f"{self.transformer_config.in_channels}: the two come from different checkpoints"
            )


def _home(part: Part) -> Path | None:
    """The checkpoint folder that a part lies in, if it lies in one."""
    return next((folder for folder in (part.source, *part.source.parents[:2]) if _is_checkpoint(folder)), None)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "model_index.json").is_file() and read_json(folder / "model_index.json").get("_class_name") == PIPELINE


def meta_module(part: Part) -> nn.Module:
    """The module that a part's weights are for, its parameters on the meta device. Raises Qwen21Error if its config makes none."""
    if part.name == "text_encoder":
        config = encoder_config(part)
        with explained(str(part.config_path if part.config else part.source)), meta_parameters():
            model = Qwen3VLModel(config)
        model.language_model.norm = nn.Identity()  # the states are wanted before it
        return model
    with meta_parameters():
        return QwenImage21Transformer(transformer_config(part)) if part.name == "transformer" else QwenImage21VAE(vae_config(part))


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
