"""The built-in tiny checkpoint (`model/`) and everything that made it: the world it paints, its captions, its training and its evaluation."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
