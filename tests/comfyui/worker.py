"""A process inside ComfyUI that runs one check of `inside/` after another."""

import json
import os
import subprocess
import threading
from pathlib import Path

from .install import Install

PATIENCE = 240  # seconds a check may take


class Worker:
    """ComfyUI without a server, in its own Python and in `base`."""

    def __init__(self, install: Install, base: Path):
        self.log = base / "worker.log"
        program = Path(__file__).parent / "inside/host.py"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        with self.log.open("wb") as log:
            command = [str(install.python), str(program), str(install.folder), str(base)]
            self.process = subprocess.Popen(command, cwd=install.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True)

    def run(self, check: str) -> str | None:
        """Run "module:function"; its traceback if it fails."""
        watch = threading.Timer(PATIENCE, self.process.kill)
        watch.start()
        try:
            self.process.stdin.write(check + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watch.cancel()
        return json.loads(answer) if answer else f"ComfyUI ended or hung in {check}:\n{self.log.read_text()[-3000:]}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
