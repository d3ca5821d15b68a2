"""A running ComfyUI server, talked to as the front end does: HTTP to ask, a websocket to listen."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import websocket

from .install import Install

PATIENCE = 180  # seconds for anything to happen before a test gives up


@dataclass
class Finished:
    """What the websocket said while a prompt ran (JSON messages, and the kinds of binary ones), and its entry in the history."""

    messages: list[dict] = field(default_factory=list)
    binary: list[int] = field(default_factory=list)
    history: dict = field(default_factory=dict)

    def of(self, kind: str) -> list[dict]:
        return [message["data"] for message in self.messages if message["type"] == kind]

    @property
    def error(self) -> str | None:
        return next((data["exception_message"].strip() for data in self.of("execution_error")), None)


class Server:
    """ComfyUI in `base`, listening on a port of its own."""

    def __init__(self, install: Install, base: Path):
        self.base, self.log = base, base / "server.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [install.python, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", self.port, "--disable-auto-launch", "--disable-api-nodes"]
        command += ["--base-directory", base, "--database-url", "sqlite:///:memory:", "--preview-method", "latent2rgb"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([str(part) for part in command], cwd=install.folder, stdout=log, stderr=log, env=environment)
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"ComfyUI did not start:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        """HTTP status and the answer's JSON (empty if there is none)."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text else {}

    @contextmanager
    def listening(self):
        """A `Listener` under a client id of its own."""
        client = uuid.uuid4().hex
        connection = websocket.create_connection(f"ws://127.0.0.1:{self.port}/ws?clientId={client}", timeout=PATIENCE)
        try:
            yield Listener(self, client, connection)
        finally:
            connection.close()

    def run(self, graph: dict, **extra) -> Finished:
        """Queue a graph in API format and wait until it is done."""
        with self.listening() as listener:
            return listener.finish(listener.queue(graph, **extra))


@dataclass
class Listener:
    server: Server
    client: str
    connection: websocket.WebSocket

    def queue(self, graph: dict, **extra) -> str:
        """The id of the queued prompt."""
        status, answer = self.server.post("/prompt", {"prompt": graph, "client_id": self.client, "extra_data": extra})
        assert status == 200, answer
        return answer["prompt_id"]

    def receive(self, into: Finished) -> dict:
        """The next JSON message; binary ones on the way are noted."""
        while True:
            message = self.connection.recv()
            if isinstance(message, str):
                into.messages.append(json.loads(message))
                return into.messages[-1]
            into.binary.append(int.from_bytes(message[:4], "big"))

    def finish(self, prompt_id: str) -> Finished:
        finished = Finished()
        ends = ("execution_success", "execution_error", "execution_interrupted")
        while True:
            message = self.receive(finished)
            if message["type"] in ends and message["data"]["prompt_id"] == prompt_id:
                break
        end = time.monotonic() + PATIENCE
        while not finished.history and time.monotonic() < end:  # written a moment after the message
            finished.history = self.server.get(f"/history/{prompt_id}").get(prompt_id, {})
            time.sleep(0.02)
        return finished
