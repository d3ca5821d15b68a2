"""The denoiser as a ComfyUI MODEL: a ModelPatcher around a BaseModel, built from ComfyUI's operations.

ComfyUI calls the model with whole batches and many times a run. Here a batch falls apart into rows that share a prefix (text, slots and
references), each prefix is prefilled as far as it is new, and all its rows are denoised against it.
"""

import json
from collections.abc import Hashable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.model_sampling
import comfy.patcher_extension
import comfy.supported_models_base
import comfy.utils
import torch
from comfy.ldm.modules.attention import attention_pytorch, optimized_attention

from ..qwen21.attention import full_attention
from ..qwen21.checkpoint import Checkpoint, meta_module
from ..qwen21.config import ModelIndex, ScheduleConfig, VAEConfig
from ..qwen21.errors import Qwen21Error
from ..qwen21.prefix_cache import PrefixCache
from ..qwen21.schedule import mu
from ..qwen21.transformer import Hooks, QwenImage21Transformer
from ..qwen21.vae import denormalize, normalize
from ..qwen21.workspace import SideStreamCopies
from .bridge_fp8 import fp8_weights
from .bridge_hooks import PREFIX_OPTION, HostHooks, residuals_of, rows_of
from .bridge_operations import with_kernels
from .bridge_prefix import CACHE_OPTION, CacheSettings, Run, RunPrefix, TextKeys
from .bridge_stored import finish, quantization_of, state_dict
from .common import LATENT_CHANNELS, LATENT_RATIO

PREVIEW = json.loads((Path(__file__).parent / "latent_rgb_factors.json").read_text(encoding="utf-8"))


def host_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, transformer_options: dict) -> torch.Tensor:
    """Unmasked attention of ComfyUI's choice (sage, flash, PyTorch ...) on (batch, heads, tokens, head_dim).

    Where that is PyTorch's, the core's is called on GPUs that have a kernel for it, or on which PyTorch prefers cuDNN's: ComfyUI would have it try
    flash attention first, which is slower there.
    """
    if optimized_attention is attention_pytorch and "optimized_attention_override" not in transformer_options and prefers_cudnn(q.device):
        return full_attention(q, k, v)
    return optimized_attention(q, k, v, q.shape[1], skip_reshape=True, skip_output_reshape=True, transformer_options=transformer_options)


@cache
def prefers_cudnn(device: torch.device) -> bool:
    """Whether `device` is one of Hopper's or Blackwell's data centre GPUs, on which PyTorch (2.11, seen on Hopper) tries cuDNN's attention first."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


class Denoiser(QwenImage21Transformer):
    """The core's transformer behind the call that ComfyUI makes. Parameters keep their names, so LoRA loaders find them."""

    def __init__(self, config, dtype=None, device=None, operations=None, **_):
        super().__init__(config, with_kernels(operations), device, dtype)
        self.dtype = dtype
        self.cache = PrefixCache()
        self.run = Run(self.cache)

    def forward(self, x, timesteps, context=None, ref_latents=None, image_slots=None, transformer_options={}, **kwargs):
        """Velocity of `x` (rows, 64, height, width) at sigmas `timesteps` (rows,); `context` (rows, tokens, width) and each of
        `ref_latents` (rows, 64, h, w) hold the rows' prefixes. References without a slot follow the text. The order of
        arguments, which wrappers see, is that of ComfyUI's own model."""
        wrappers = comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, transformer_options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timesteps, context, ref_latents, image_slots, transformer_options, **kwargs)

    def _forward(self, x, timesteps, context, ref_latents=None, image_slots=None, transformer_options={}, text_keys=None, control=None, **_):
        self.run.start()
        attention = partial(host_attention, transformer_options=transformer_options)
        settings = transformer_options.get(CACHE_OPTION, CacheSettings())
        references = list(ref_latents or [])
        slots = (list(image_slots or []) + [context.shape[1]] * len(references))[: len(references)]

        layers = len(self.transformer_blocks)
        hooked = transformer_options.get(PREFIX_OPTION, False)
        if hooked:
            settings = replace(settings, device="off")

        def prefill(context, slots, references, past):
            hooks = HostHooks(transformer_options, None, [], layers, is_prefix=True) if hooked else Hooks()
            return self.prefill(context, slots, references, past, attention, hooks)

        groups: list[tuple[list[int], RunPrefix]] = []
        for row in range(context.shape[0]):
            parts = context[row : row + 1], slots, [latents[row : row + 1] for latents in references]
            rows = next((rows for rows, prefix in groups if prefix.is_made_of(*parts)), None)
            if rows is None:
                groups.append(([row], self._prefix(*parts, text_keys, settings, prefill)))
            else:
                rows.append(row)
        out = torch.empty_like(x)
        for rows, prefix in groups:
            noisy = rows_of(x, rows)
            hooks = HostHooks(transformer_options, noisy, residuals_of(control, rows), layers)
            velocity = self.denoise(noisy, rows_of(timesteps, rows), prefix.kv, attention, hooks, self.run.workspace)
            for row, one in zip(rows, velocity):
                out[row] = one
        return out

    def _prefix(self, *parts) -> RunPrefix:
        """Run.prefix; when memory runs out, the cache gives way and it is tried once more."""
        try:
            return self.run.prefix(*parts)
        except comfy.model_management.OOM_EXCEPTION as error:
            comfy.model_management.raise_non_oom(error)
        self.cache.tree.clear()
        comfy.model_management.soft_empty_cache()
        return self.run.prefix(*parts)


class LatentFormat(comfy.latent_formats.LatentFormat):
    """64 channels, 16 pixels a latent position. A LATENT holds what the VAE gives; the sampler normalises it with the VAE's statistics."""

    latent_channels = LATENT_CHANNELS
    spacial_downscale_ratio = LATENT_RATIO

    def __init__(self, vae: VAEConfig, preview: dict | None = None):
        """`vae` brings the statistics; `preview` a checkpoint's own "factors" (64, 3) and "bias" (3) for previews. Without it ComfyUI's for
        this latent serve, else the pack's."""
        self.vae = vae
        preview = preview or _host_preview() or PREVIEW
        self.latent_rgb_factors, self.latent_rgb_factors_bias = preview["factors"], preview["bias"]

    def process_in(self, latent: torch.Tensor) -> torch.Tensor:
        """Raises Qwen21Error for another model's latents, wherever ComfyUI took them from: a LATENT or a conditioning's references."""
        if latent.ndim != 4 or latent.shape[1] != self.latent_channels:
            raise Qwen21Error(
                f"latents have shape {tuple(latent.shape)}, Qwen-Image 2.1 needs (batch, {self.latent_channels}, rows, columns): encode the "
                "picture with the VAE of the Qwen-Image 2.1 Loader"
            )
        return normalize(latent, self.vae)

    def process_out(self, latent: torch.Tensor) -> torch.Tensor:
        return denormalize(latent, self.vae)


def _host_preview() -> dict | None:
    """ComfyUI's own factors for this latent, on versions that know the model."""
    host = getattr(comfy.latent_formats, "QwenImage21", None)
    made = host() if host else None
    return {"factors": made.latent_rgb_factors, "bias": made.latent_rgb_factors_bias} if made and made.latent_rgb_factors else None


class ModelConfig(comfy.supported_models_base.BASE):
    """What ComfyUI asks a model's config. Also carries the checkpoint's schedule and index, for the sampler and schedule nodes."""

    unet_extra_config: dict = {}
    memory_usage_factor = 6.0  # ComfyUI's own for this model
    supported_inference_dtypes = [torch.bfloat16, torch.float32]

    def __init__(self, checkpoint: Checkpoint):
        self.schedule: ScheduleConfig = checkpoint.schedule
        self.index: ModelIndex = checkpoint.index
        self.sampling_settings = {"shift": mu(checkpoint.schedule, (checkpoint.index.native_resolution // LATENT_RATIO) ** 2)}
        super().__init__({"config": checkpoint.transformer_config, "image_model": "qwen_image21"})
        self.latent_format = LatentFormat(checkpoint.vae_config, checkpoint.preview_factors)


class QwenImage21(comfy.model_base.QwenImage):
    """A QwenImage to ComfyUI, so that its LoRA loaders map every layout they know; what that family ties to 16 channels is overridden.

    `extra_conds` (inherited, with `image_slots` added) normalises reference latents: the only place where that happens.
    """

    def __init__(self, model_config: ModelConfig, device=None):
        super().__init__(model_config, comfy.model_base.ModelType.FLUX, device=device, unet_model=Denoiser)

    @property
    def current_patcher(self):
        """Set by ComfyUI when a run begins, None when it ends."""
        return self._current_patcher

    @current_patcher.setter
    def current_patcher(self, patcher) -> None:
        self._current_patcher = patcher
        if not hasattr(self, "diffusion_model"):
            return
        denoiser = self.diffusion_model
        denoiser.run.close()
        if patcher is not None:
            denoiser.run = Run(denoiser.cache, _weights(patcher))

    def process_timestep(self, timestep, **_):
        """Back to sigma, whatever multiplier a shift node's sampling object applied."""
        return timestep / getattr(self.model_sampling, "multiplier", 1.0)

    def extra_conds(self, **kwargs):
        out = super().extra_conds(**kwargs)
        out["image_slots"] = comfy.conds.CONDConstant(list(kwargs.get("image_slots") or []))
        identity, states = kwargs.get("qwen21_text"), kwargs.get("cross_attn")
        keys = identity.of(states) if identity is not None and states is not None else None
        if keys is not None:
            out["text_keys"] = comfy.conds.CONDConstant(TextKeys(states, keys))
        return out

    def extra_conds_shapes(self, **kwargs):
        out = {}
        channels = self.latent_format.latent_channels
        if kwargs.get("reference_latents"):
            out["ref_latents"] = [1, channels, sum(latents.numel() for latents in kwargs["reference_latents"]) // channels]
        if kwargs.get("cross_attn") is not None:
            out["c_crossattn"] = list(kwargs["cross_attn"].shape)
        return out

    def memory_required(self, input_shape, cond_shapes={}):
        """Activations of target and references as ComfyUI estimates them, and the prefix's keys and values with the scratch they are joined in."""
        config = self.diffusion_model.config
        tokens = sum(shape[1] for shape in cond_shapes.get("c_crossattn", [])) + sum(shape[2] for shape in cond_shapes.get("ref_latents", []))
        kv_bytes = 2 * (config.num_layers + SideStreamCopies.slots) * config.dim * tokens * comfy.model_management.dtype_size(self.get_dtype_inference())
        return super().memory_required(input_shape, cond_shapes) + kv_bytes


def _detached(patcher, unloaded: bool) -> None:
    """When ComfyUI unloads the model, to make room or because it is no longer wanted, the cache goes with it. A clone that takes over does not unload."""
    if unloaded:
        patcher.model.diffusion_model.cache.tree.clear()


@cache
def _giving_way(patcher_class):
    """`patcher_class`, whose prefixes go before its weights when ComfyUI wants room for another model."""

    class GivingWay(patcher_class):
        def partially_unload(self, device_to, memory_to_free=0, **kwargs):
            freed = self.model.diffusion_model.cache.give_way(memory_to_free, self.load_device)
            return freed + (super().partially_unload(device_to, memory_to_free - freed, **kwargs) if freed < memory_to_free else 0)

    return GivingWay


def _weights(patcher) -> Hashable | None:
    """What of a patcher decides keys and values. None under hooks: they change weights in mid-run, and nothing a call receives says so."""
    if patcher.hook_patches:
        return None
    replaced = tuple(sorted((name, id(value)) for name, value in patcher.object_patches.items() if name.startswith("diffusion_model.")))
    injected = tuple(one for some in patcher.injections.values() for one in some)  # ComfyUI's LoRA loader in bypass mode; patches_uuid does not know it
    override = patcher.model_options["transformer_options"].get("optimized_attention_override")
    return patcher.patches_uuid, replaced, injected, override


def load_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None, fp8: bool = False, disable_dynamic: bool = False):
    """The denoiser of `checkpoint` as a MODEL, for latents of its VAE. `dtype` None leaves the choice to ComfyUI; quantised weights stay as they are.
    With `fp8` the blocks' matrices are in 8 bits, as ComfyUI stores them, and multiplied so where the device can.

    Raises Qwen21Error that names the file when it is damaged or another model's.
    """
    config, part = ModelConfig(checkpoint), checkpoint.parts["transformer"]
    management = comfy.model_management
    weights = state_dict(part, meta_module(part))
    if fp8:
        weights = fp8_weights(weights)
    config.quant_config = {"mixed_ops": True} if fp8 else quantization_of(part)
    supported = config.supported_inference_dtypes
    parameters, file_dtype = comfy.utils.calculate_parameters(weights), None if config.quant_config else comfy.utils.weight_dtype(weights)
    weight_dtype = dtype or management.unet_dtype(model_params=parameters, supported_dtypes=supported, weight_dtype=file_dtype)
    device, offload = management.get_torch_device(), management.unet_offload_device()
    config.set_inference_dtype(weight_dtype, management.unet_manual_cast(None if config.quant_config else weight_dtype, device, supported))

    model = QwenImage21(config)
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    patcher = _giving_way(patcher_class)(model, load_device=device, offload_device=offload)
    patcher.cached_patcher_init = (load_model, (checkpoint, dtype, fp8))
    patcher.add_callback(comfy.patcher_extension.CallbacksMP.ON_DETACH, _detached)
    if not management.is_device_cpu(offload):
        model.to(offload)
    model.load_model_weights(dict(weights), "", assign=patcher.is_dynamic())
    finish(model.diffusion_model, weights)
    return patcher
