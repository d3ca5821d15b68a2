"""What several nodes share."""

import logging

from server import PromptServer

CATEGORY = "Qwen-Image 2.1"
LATENT_CHANNELS = 64
LATENT_RATIO = 16  # pixels a latent row or column stands for


def say(text: str, node_id: str | None) -> None:
    """Show a sentence on the running node, and log it."""
    logging.info("Qwen-Image 2.1: %s", text)
    if node_id is not None and getattr(PromptServer, "instance", None) is not None:
        PromptServer.instance.send_progress_text(text, node_id)
