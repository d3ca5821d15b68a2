"""Qwen-Image 2.1 in plain PyTorch: the model core of the node pack, usable without ComfyUI."""

__version__ = "0.1.0"
