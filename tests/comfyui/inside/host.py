"""Runs inside ComfyUI: boots it without a server, with the pack; then runs the checks that come in on stdin and answers each with a line of JSON."""

import asyncio
import importlib
import json
import os
import sys
import traceback
from pathlib import Path


def boot(comfyui: str, base: str) -> None:
    sys.path.insert(0, comfyui)
    from comfy.cli_args import args

    args.cpu, args.base_directory, args.disable_api_nodes = True, base, True
    import torch

    import nodes

    torch.set_num_threads(1)

    async def load() -> None:
        from server import PromptServer

        PromptServer(asyncio.get_running_loop())
        await nodes.init_builtin_extra_nodes()
        assert await nodes.load_custom_node(str(next(Path(base, "custom_nodes").iterdir()))), "the pack does not load"

    asyncio.run(load())


def answer(check: str) -> str | None:
    import torch

    module, function = check.split(":")
    try:
        with torch.inference_mode():  # as ComfyUI executes nodes
            getattr(importlib.import_module(module), function)()
    except BaseException:
        return traceback.format_exc()
    return None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever ComfyUI prints goes to the log
    boot(*sys.argv[1:])
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), file=answers, flush=True)


if __name__ == "__main__":
    main()
