"""The built-in tiny checkpoint (`model/`) and what it takes to make one: the world it paints, its captions, its training and its evaluation."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
TOKENIZER = Path(__file__).parent / "tokenizer.json"  # of the grammar
