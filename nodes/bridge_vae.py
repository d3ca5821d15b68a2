"""The autoencoder as a ComfyUI VAE: pixels (batch, height, width, 3 or 4) in [0, 1], LATENTs not normalised."""

import logging
from contextlib import contextmanager

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import torch

from ..qwen21 import kernels
from ..qwen21.checkpoint import Checkpoint, meta_module
from ..qwen21.config import VAEConfig
from ..qwen21.vae import QwenImage21VAE
from .bridge_operations import with_lending
from .bridge_stored import state_dict

# Bytes a pixel and byte of dtype, to decode and to encode, from the peaks that tests/bench/vae.py measures at the published widths, less weights:
# with kernels, which ComfyUI's convolutions use too (1.6 and 0.8 GiB for 1024 x 1024 in bfloat16), and without (6.6 and 2.3 GiB, the reference's).
KERNEL_BYTES, PLAIN_BYTES = (900, 450), (3300, 1400)


class QwenImage21ComfyVAE(comfy.sd.VAE):
    """The VAE of `checkpoint`. RGB pictures are taken as opaque; `dtype` None leaves the choice to ComfyUI, without float16, which overflows."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None):
        with _quiet():
            super().__init__(sd={})  # sets the defaults and, finding no weights, stops there
        management, config = comfy.model_management, checkpoint.vae_config
        self.downscale_ratio = self.upscale_ratio = config.spatial_ratio
        self.latent_channels, self.output_channels = config.z_dim, config.out_channels
        self.pad_channel_value = 1.0  # RGB in is opaque
        self.working_dtypes = [torch.bfloat16, torch.float32]  # float16 overflows
        self.device, self.output_device = management.vae_device(), management.intermediate_device()
        self.memory_used_decode, self.memory_used_encode = _memory_use(config, self.device)
        self.vae_dtype = dtype or management.vae_dtype(self.device, self.working_dtypes)
        self.config = config

        self.first_stage_model = QwenImage21VAE(config, with_lending(comfy.ops.disable_weight_init)).eval().to(self.vae_dtype)
        management.archive_model_dtypes(self.first_stage_model)
        self.patcher = comfy.model_patcher.CoreModelPatcher(self.first_stage_model, load_device=self.device, offload_device=management.vae_offload_device())
        part = checkpoint.parts["vae"]
        self.first_stage_model.load_state_dict(state_dict(part, meta_module(part)), assign=self.patcher.is_dynamic())
        self.model_size()

    def decode_tiled_(self, samples: torch.Tensor, tile_x: int = 32, tile_y: int = 32, overlap: int = 0) -> torch.Tensor:
        """Tiles of the larger side (latent positions), each with the surroundings it needs, so that no overlap has to be blended."""
        return self.process_output(self._each(self.first_stage_model.decode, samples, max(tile_x, tile_y)))

    def encode_tiled_(self, pixel_samples: torch.Tensor, tile_x: int = 512, tile_y: int = 512, overlap: int = 0) -> torch.Tensor:
        """Tiles of the larger side (pixels), each with the surroundings it needs."""
        tile = -(-max(tile_x, tile_y) // self.downscale_ratio) * self.downscale_ratio
        return self._each(self.first_stage_model.encode, self.process_input(pixel_samples), tile)

    def _each(self, function, batch: torch.Tensor, tile: int) -> torch.Tensor:
        """One picture after another, for memory's sake."""
        progress = comfy.utils.ProgressBar(len(batch))
        results = []
        for item in batch.split(1):
            results.append(function(item.to(self.device, self.vae_dtype), tile=tile).to(self.output_device, self.vae_output_dtype()))
            progress.update(1)
        return torch.cat(results)


def _memory_use(config: VAEConfig, device: torch.device):
    decode_bytes, encode_bytes = KERNEL_BYTES if kernels.run_on(device) else PLAIN_BYTES

    def decode(shape, dtype):
        area = shape[-2] * shape[-1] * config.spatial_ratio**2
        return decode_bytes * area * config.decoder_base_dim / 144 * comfy.model_management.dtype_size(dtype)

    def encode(shape, dtype):
        return encode_bytes * shape[-2] * shape[-1] * config.base_dim / 96 * comfy.model_management.dtype_size(dtype)

    return decode, encode


@contextmanager
def _quiet():
    """The base class warns that it was given no weights, which is how it is meant here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)


def load_vae(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> QwenImage21ComfyVAE:
    """The autoencoder of `checkpoint` as a VAE. Raises Qwen21Error that names the file when it is damaged or another model's."""
    return QwenImage21ComfyVAE(checkpoint, dtype)
