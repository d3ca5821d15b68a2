"""The text encoder as a ComfyUI CLIP: transformers' Qwen3-VL with ComfyUI's operations in place of its layers."""

import uuid
from collections.abc import Sequence
from types import SimpleNamespace

import comfy.model_management
import comfy.ops
import comfy.patcher_extension
import comfy.sd
import comfy.utils
import numpy as np
import torch
from PIL import Image
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from ..qwen21.checkpoint import Checkpoint, meta_module
from ..qwen21.config import ModelIndex
from ..qwen21.errors import Qwen21Error
from ..qwen21.pictures import flatten
from ..qwen21.prefix_cache import digest
from ..qwen21.text_encoder import Encoding, TextEncoder, template
from .bridge_prefix import TextIdentity
from .bridge_stored import finish, quantization_of, state_dict

TOKENS = "qwen21"  # the key under which tokenize() hands prompt and pictures to the encoder


class Tokenizer:
    """ComfyUI tokenizes and encodes in two calls; here the first only collects what the second reads, as tokens depend on the pictures."""

    def __init__(self, embedding_directory=None, tokenizer_data={}):
        pass

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, images: Sequence[Image.Image] = (), **_):
        template(text, len(images))  # refuses vision tokens and too many pictures
        return {TOKENS: [(text, tuple(images))]}

    def state_dict(self) -> dict:
        return {}


class Qwen3VL(torch.nn.Module):
    """ComfyUI's contract for a text encoder, over the core's TextEncoder."""

    def __init__(self, checkpoint: Checkpoint, operations, compute_dtype: torch.dtype, dtype: torch.dtype, device: torch.device, model_options: dict):
        """`dtype` is what weights are stored in, `compute_dtype` what the states are computed in."""
        super().__init__()
        self.model = meta_module(checkpoint.parts["text_encoder"])
        self.encoder = TextEncoder(self.model, checkpoint.tokenizer(), checkpoint.picture_processor(), remember=True)
        swap_operations(self.model, operations, dtype, device)
        self.dtypes = {dtype}
        self.native_resolution = checkpoint.index.native_resolution
        self.encoder.dtype = compute_dtype
        self.identity, self.patches = uuid.uuid4(), None

    def load_sd(self, weights: dict[str, torch.Tensor]):
        return self.model.load_state_dict(weights, strict=False, assign=getattr(self, "can_assign_sd", False))

    def set_clip_options(self, options: dict) -> None:
        if "execution_device" in options:
            self.encoder.device = options["execution_device"]

    def reset_clip_options(self) -> None:
        pass

    def memory_estimation_function(self, tokens: dict, device=None) -> int:
        """Bytes: a float32 working set of some twenty widths and the keys and values of every layer, a token."""
        text = self.model.config.text_config
        (prompt, pictures), *_ = tokens[TOKENS]
        count = len(prompt) + 64 + sum(picture.width * picture.height // 1024 for picture in pictures)
        return count * 4 * (20 * text.hidden_size + 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim)

    def encode_token_weights(self, tokens: dict):
        (prompt, pictures), *_ = tokens[TOKENS]
        (cond, extra), *_ = self.encode([prompt], pictures)
        return cond, None, extra

    def encode(self, prompts: Sequence[str], pictures: Sequence[Image.Image]) -> list[tuple[torch.Tensor, dict]]:
        """(states, conditioning keys) a prompt; the vision tower runs once a picture, and what the last call shares is not computed again."""
        patches = getattr(self, "current_weight_patches_uuid", None)  # ComfyUI's: which LoRAs the weights carry at present
        if patches != self.patches:
            self.encoder.forget()
            self.patches = patches
        return [self._conditioning(encoding) for encoding in self.encoder.encode(prompts, pictures)]

    def _conditioning(self, encoding: Encoding) -> tuple[torch.Tensor, dict]:
        states = encoding.states.to(comfy.model_management.intermediate_device(), torch.float32)
        encoder = (self.identity, self.patches)
        identity = TextIdentity(tuple((encoder, key) for key in encoding.keys), digest(states))
        return states, {"image_slots": list(encoding.image_slots), "qwen21_token_ids": list(encoding.token_ids), "qwen21_text": identity}


def swap_operations(model: torch.nn.Module, operations, dtype: torch.dtype, device: torch.device) -> None:
    """Put ComfyUI's layers where transformers built its own, so that weights may be offloaded, cast on use, or quantised."""
    factory = {"dtype": dtype, "device": device}
    for parent in list(model.modules()):
        for name, old in list(parent.named_children()):
            new = _host_layer(old, operations, factory)
            if new is not None:
                setattr(parent, name, new.requires_grad_(False).eval())


def _host_layer(old: torch.nn.Module, operations, factory: dict) -> torch.nn.Module | None:
    nn = torch.nn
    if type(old) is nn.Linear:
        return operations.Linear(old.in_features, old.out_features, bias=old.bias is not None, **factory)
    if type(old) is nn.Embedding:
        return operations.Embedding(old.num_embeddings, old.embedding_dim, **factory)
    if type(old) is nn.LayerNorm:
        return operations.LayerNorm(old.normalized_shape, eps=old.eps, **factory)
    if type(old) is nn.Conv3d:
        return operations.Conv3d(old.in_channels, old.out_channels, old.kernel_size, stride=old.stride, bias=old.bias is not None, **factory)
    if type(old) is Qwen3VLTextRMSNorm:
        return operations.RMSNorm(old.weight.shape[0], eps=old.variance_epsilon, **factory)
    return None


def load_clip(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> comfy.sd.CLIP:
    """The text encoder of `checkpoint` as a CLIP. `dtype` is what weights are stored in; None: the file's own (on a CPU float32 if that is not
    8 bits or quantised). It computes in bfloat16, on a CPU in float32.

    Raises Qwen21Error that names the file when it is damaged or another model's.
    """
    part = checkpoint.parts["text_encoder"]
    weights = state_dict(part, meta_module(part))
    on_cpu = comfy.model_management.is_device_cpu(comfy.model_management.text_encoder_device())
    compute_dtype = torch.float32 if on_cpu else torch.bfloat16
    quantization = quantization_of(part)
    operations = comfy.ops.mixed_precision_ops(quantization, compute_dtype) if quantization else comfy.ops.manual_cast
    if dtype is None:
        file_dtype = compute_dtype if quantization else comfy.utils.weight_dtype(weights)
        dtype = compute_dtype if on_cpu and file_dtype.itemsize > 1 else file_dtype
    parts = {"checkpoint": checkpoint, "operations": operations, "compute_dtype": compute_dtype}
    target = SimpleNamespace(params=parts, clip=Qwen3VL, tokenizer=Tokenizer)
    clip = comfy.sd.CLIP(target, parameters=comfy.utils.calculate_parameters(weights), state_dict=[dict(weights)], model_options={"dtype": dtype})
    finish(clip.cond_stage_model.model, weights)
    clip.patcher.add_callback(comfy.patcher_extension.CallbacksMP.ON_DETACH, lambda patcher, unloaded: patcher.model.encoder.forget() if unloaded else None)
    return clip


def encode_prompts(clip: comfy.sd.CLIP, prompts: Sequence[str], pictures: Sequence[Image.Image]) -> list[list]:
    """A CONDITIONING a prompt, all over the same RGBA pictures; the vision tower runs once, except in a CLIP of ComfyUI's own loader.

    Raises Qwen21Error if the CLIP is another model's.
    """
    if _is_core_encoder(clip):
        images = [to_image(flatten(picture))[..., :3] for picture in pictures]
        for prompt in prompts:
            template(prompt, len(pictures))
        return [clip.encode_from_tokens_scheduled(clip.tokenize(prompt, images=images, keep_vision=False, prevent_empty_text=True)) for prompt in prompts]
    encoder = our_encoder(clip)
    clip.load_model(clip.tokenize(max(prompts, key=len), images=pictures))
    encoder.set_clip_options({"execution_device": clip.patcher.load_device})
    with comfy.model_management.cuda_device_context(clip.patcher.load_device):
        outputs = encoder.encode(prompts, pictures)
    return [[[cond, clip.add_hooks_to_dict({"pooled_output": None, **extra})]] for cond, extra in outputs]


def native_resolution(clip: comfy.sd.CLIP) -> int:
    """Of the checkpoint a CLIP comes from; the published model's if it is of ComfyUI's own loader. Raises Qwen21Error as `our_encoder`."""
    return ModelIndex().native_resolution if _is_core_encoder(clip) else our_encoder(clip).native_resolution


def _is_core_encoder(clip: comfy.sd.CLIP) -> bool:
    """Whether this is the text encoder of Qwen-Image 2.1 as versions of ComfyUI that know the model load it."""
    return any(one.__name__ == "QwenImage21TEModel" for one in type(getattr(clip, "cond_stage_model", None)).__mro__)


def our_encoder(clip: comfy.sd.CLIP) -> Qwen3VL:
    """The encoder inside a CLIP. Raises Qwen21Error that says what was found if it is another model's."""
    if clip is None:
        raise Qwen21Error("no CLIP is connected: connect the CLIP output of the Qwen-Image 2.1 Loader")
    encoder = getattr(clip, "cond_stage_model", None)
    if not isinstance(encoder, Qwen3VL):
        raise Qwen21Error(
            f"the CLIP is a {type(encoder).__name__}, expected the Qwen3-VL text encoder of Qwen-Image 2.1: connect the CLIP output of the Qwen-Image "
            "2.1 Loader"
        )
    return encoder


def to_pictures(images: torch.Tensor) -> list[Image.Image]:
    """RGBA pictures of an IMAGE (batch, height, width, 3 or 4) in [0, 1]; without a fourth channel they are opaque."""
    levels = (images.float().cpu().clamp(0, 1).numpy() * 255).round().astype(np.uint8)
    return [Image.fromarray(level).convert("RGBA") for level in levels]


def to_image(picture: Image.Image) -> torch.Tensor:
    """The inverse of `to_pictures` for one picture: IMAGE (1, height, width, 4)."""
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255.0)[None]
