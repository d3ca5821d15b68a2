"""What a command left behind, and damage to checkpoint folders."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """What a command left: exit code, stdout, and the lines of stderr without progress bars."""

    code: int
    stdout: str
    lines: list[str]

    def failed(self, code: int) -> str:
        """The one line of stderr of a run that failed with `code`."""
        assert (self.code, len(self.lines), self.stdout) == (code, 1, ""), self
        return self.lines[0]


def stderr_lines(stderr: str) -> list[str]:
    return [line for line in stderr.split("\n") if line and not line.lstrip("\r").startswith("painting:")]


def replace(path: Path, content: bytes | str | dict) -> None:
    """Give `path` other content without touching what it may be a link to."""
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode())


def change_json(path: Path, **values: object) -> None:
    """Set keys of the JSON object in `path`; `...` removes one."""
    content = json.loads(path.read_text()) | values
    replace(path, {key: value for key, value in content.items() if value is not ...})
