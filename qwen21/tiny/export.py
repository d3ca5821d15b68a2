"""python -m qwen21.tiny.export VAE JOINT: what the two stages of training wrote, as a checkpoint folder in the diffusers layout, bf16."""

import argparse
import dataclasses
import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import MODEL, world
from .models import TRANSFORMER, text_encoder_config
from .tokens import load_tokenizer, save_processor
from .train_joint import load_start, load_vae
from .train_vae import CONFIG

SCHEDULE = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.42.1", "num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": True,
    "time_shift_type": "exponential", "base_image_seq_len": 256, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9, "shift_terminal": 0.02,
    "invert_sigmas": False, "stochastic_sampling": False, "use_beta_sigmas": False, "use_exponential_sigmas": False, "use_karras_sigmas": False,
}  # fmt: skip
INDEX = {
    "_class_name": "QwenImage21Pipeline", "_diffusers_version": "0.42.1", "native_resolution": world.NATIVE,
    "processor": ["transformers", "Qwen3VLProcessor"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"], "transformer": ["diffusers", "QwenImage21Transformer2DModel"], "vae": ["diffusers", "AutoencoderKLQwenImage21"],
}  # fmt: skip


def write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_part(folder: Path, config: dict, tensors: dict[str, torch.Tensor], name: str = "diffusion_pytorch_model.safetensors") -> None:
    write_json(folder / "config.json", config)
    save_file({key: value.to(torch.bfloat16).contiguous() for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})


def unused_time_convolutions(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros for the video layers that the published layout has and one frame never meets."""
    out = {}
    for level, temporal in enumerate(CONFIG.temperal_downsample):
        if temporal:
            width = tensors[f"encoder.down_blocks.{level}.downsampler.resample.1.weight"].shape[0]
            out |= {
                f"encoder.down_blocks.{level}.downsampler.time_conv.{k}": torch.zeros(*s) for k, s in (("weight", (width, width, 1, 1)), ("bias", (width,)))
            }
    for level, temporal in enumerate(reversed(CONFIG.temperal_downsample)):
        if temporal:
            width = tensors[f"decoder.up_blocks.{level}.upsampler.resample.1.weight"].shape[1]
            out |= {
                f"decoder.up_blocks.{level}.upsampler.time_conv.{k}": torch.zeros(*s) for k, s in (("weight", (2 * width, width, 1, 1)), ("bias", (2 * width,)))
            }
    return out


@torch.inference_mode()
def rgb_factors(vae, mean: torch.Tensor, std: torch.Tensor, count: int = 40) -> dict[str, list]:
    """Least squares from normalised latents to the RGB over white (-1 ... 1) of the 16 x 16 pixels below: factors (64, 3) and bias (3)."""
    rng = random.Random(4)
    things, backgrounds = world.pack([world.draw_scene(rng) for _ in range(count)])
    rows, targets = [], []
    for i in range(0, count, 10):
        pixels = world.render(things[i : i + 10], backgrounds[i : i + 10], world.NATIVE, world.NATIVE, world.palette())
        alpha = pixels[:, 3:] * 0.5 + 0.5
        small = torch.nn.functional.avg_pool2d(pixels[:, :3] * alpha + 1 - alpha, 16)
        latents = (vae.encode(pixels) - mean[:, None, None]) / std[:, None, None]
        rows.append(latents.permute(0, 2, 3, 1).reshape(-1, 64))
        targets.append(small.permute(0, 2, 3, 1).reshape(-1, 3))
    x, y = torch.cat(rows), torch.cat(targets)
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], dim=1), y).solution
    rounded = [[round(v, 5) for v in row] for row in solution.tolist()]
    return {"factors": rounded[:-1], "bias": rounded[-1]}


def export_vae(folder: Path, out: Path) -> None:
    """`vae/` and the preview factors."""
    vae, mean, std = load_vae(folder, "cpu")
    tensors, mean, std = vae.state_dict(), mean.flatten(), std.flatten()
    lists = {f"latents_{key}": [round(v, 6) for v in values.tolist()] for key, values in (("mean", mean), ("std", std))}
    config = (
        dataclasses.asdict(CONFIG)
        | lists
        | {"_class_name": "AutoencoderKLQwenImage21", "_diffusers_version": "0.42.1", "attn_scales": [], "dropout": 0.0, "is_residual": True}
    )
    config |= {"patch_size": None, "scale_factor_spatial": CONFIG.spatial_ratio, "scale_factor_temporal": 8}
    # the published layout keeps an axis for frames in the norms outside attention
    layout = {key: value[..., None] if key.endswith("gamma") and ".attentions." not in key else value for key, value in tensors.items()}
    write_part(out / "vae", config, layout | unused_time_convolutions(tensors))
    write_json(out / "latent_rgb_factors.json", rgb_factors(vae, mean, std))


def export(vae_folder: Path, joint_folder: Path, out: Path) -> None:
    export_vae(vae_folder, out)
    config = dataclasses.asdict(TRANSFORMER) | {
        "_class_name": "QwenImage21Transformer2DModel",
        "_diffusers_version": "0.42.1",
        "patch_size": 1,
        "causal_condition": True,
    }
    encoder_state, transformer_state = load_start(joint_folder)
    write_part(out / "transformer", config, transformer_state)

    tokenizer = load_tokenizer()
    config = text_encoder_config(tokenizer).to_dict() | {"architectures": ["Qwen3VLForConditionalGeneration"], "dtype": "bfloat16"}
    write_part(out / "text_encoder", config, {f"model.{key}": value for key, value in encoder_state.items()}, "model.safetensors")
    save_processor(out / "processor", tokenizer)
    write_json(out / "scheduler" / "scheduler_config.json", SCHEDULE)
    write_json(out / "model_index.json", INDEX)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qwen21.tiny.export", description="Write the trained parts as a checkpoint folder.")
    parser.add_argument("vae", type=Path, help="folder of the vae stage")
    parser.add_argument("joint", type=Path, help="folder of the joint stage")
    parser.add_argument("--out", type=Path, default=MODEL)
    arguments = parser.parse_args()
    export(arguments.vae, arguments.joint, arguments.out)


if __name__ == "__main__":
    main()
