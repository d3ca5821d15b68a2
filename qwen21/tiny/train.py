"""python -m qwen21.tiny.train vae|joint: trains the tiny checkpoint from nothing.

One GPU: as above. Several: `torchrun --nproc_per_node 2 -m qwen21.tiny.train ...`. Seeded, but stopped by the clock, so that the number
of steps depends on the machine; the log beside the weights says how many there were.
"""

import argparse
from pathlib import Path

from . import MODEL


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qwen21.tiny.train", description="Train the tiny checkpoint.")
    stages = parser.add_subparsers(dest="stage", required=True)
    vae = stages.add_parser("vae", help="the autoencoder, first")
    vae.add_argument("--seconds", type=float, default=480)
    vae.add_argument("--batch", type=int, default=48, help="pictures a step on each GPU")
    vae.add_argument("--weights", type=Path, dest="start", help="the folder of an earlier vae stage, to continue from its weights")
    joint = stages.add_parser("joint", help="denoiser and text encoder, then")
    joint.add_argument("--vae", type=Path, default=MODEL, help="the folder that the vae stage wrote, or a checkpoint folder; default: the built-in one")
    joint.add_argument("--seconds", type=float, default=900)
    joint.add_argument("--rate", type=float, default=2e-3, help="of AdamW")
    joint.add_argument("--matrix-rate", type=float, default=0.02, help="of Muon")
    joint.add_argument("--fall", type=float, default=0.5, help="last fraction of the run, with a falling rate")
    joint.add_argument("--weights", type=Path, dest="start", help="the folder of an earlier joint stage, or a checkpoint folder, to continue from its weights")
    joint.add_argument("--data", type=float, default=1.0, help="scales the number of samples")
    joint.add_argument("--batch", type=float, default=1.0, help="scales the number of samples in a step")
    joint.add_argument("--end-at", type=float, default=0.0, help="unix time at which to stop, instead of --seconds")
    joint.add_argument("--tables", type=int, default=0, help="how many smaller evaluations on the way")
    joint.add_argument("--evaluate", type=float, default=1.0, help="scales the number of prompts scored; 0: none")
    for stage in (vae, joint):
        stage.add_argument("--out", type=Path, required=True, help="folder for weights and log")
        stage.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    if arguments.pop("stage") == "vae":
        from .train_vae import train
    else:
        from .train_joint import train
    train(**arguments)


if __name__ == "__main__":
    main()
