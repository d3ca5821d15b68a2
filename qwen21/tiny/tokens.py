"""The tiny model's tokenizer: byte-level BPE trained on the grammar, with the special tokens of Qwen3-VL, and the processor's files."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from . import TOKENIZER
from .grammar import COMPOSITIONS, EDITS, draw_task

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
PAD, IMAGE = "<|endoftext|>", "<|image_pad|>"
SYSTEM = "system\nComprehend and analyze the provided prompt."
HEAD = f"<|im_start|>{SYSTEM}<|im_end|>\n"
VOCABULARY = 760  # before the special tokens
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(prompt: str, references: int) -> str:
    """The official prompt, with one <|image_pad|> a reference."""
    tags = "".join(f"{' ' if i else ''}<image{i + 1}><|vision_start|><|image_pad|><|vision_end|>" for i in range(references))
    return f"{HEAD}<|im_start|>user\n{tags}{prompt or ' '}<|im_end|>\n<|im_start|>assistant\n"


def corpus(seed: int = 1, size: int = 1500):
    """Text as the tokenizer meets it: prompts after the user's line and after a picture, and the fixed pieces of the template."""
    rng = random.Random(seed)
    for _ in range(size):
        yield SYSTEM
        yield "\nuser\n<image1>"
        yield " <image2>"
        yield " <image3>"
        yield "\nassistant\n"
        for _ in range(6):
            yield "user\n" + draw_task(rng, "t2i").prompt
        for kind in EDITS + COMPOSITIONS:
            yield draw_task(rng, kind).prompt


def train_tokenizer(seed: int = 1) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus(seed), trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save_processor(folder: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json and the configs beside it, as transformers reads them. Pictures are used at their own size (least area 1024 px)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    extra = {f"{name}_token": f"<|{name}|>" for name in ("vision_start", "vision_end")} | {f"{name}_token": f"<|{name}_pad|>" for name in ("image", "video")}
    ids = {f"{key}_id": tokenizer.token_to_id(token) for key, token in extra.items()}
    write = lambda name, value: (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    write(
        "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": "<|im_end|>", "model_max_length": 8192, "clean_up_tokenization_spaces": False,
         "chat_template": CHAT_TEMPLATE, **extra, **ids},
    )  # fmt: skip
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write(
        "preprocessor_config.json",
        {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
         "rescale_factor": 1 / 255, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
         "size": {"shortest_edge": 32 * 32, "longest_edge": 16384 * 32 * 32}},
    )  # fmt: skip


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


if __name__ == "__main__":
    train_tokenizer().save(str(TOKENIZER))
