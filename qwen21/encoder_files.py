"""What comes with the text encoder's weights: its config, tokenizer and picture processor, from files or as published."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen3VLConfig

from . import published
from .config import read_json
from .errors import Qwen21Error
from .files import one_line
from .inferred import encoder_values
from .part import Part
from .text_encoder import PictureProcessor

TEMPLATE_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
BUNDLED_TOKENIZER = Path("comfy/text_encoders/qwen25_tokenizer")  # in ComfyUI's folder
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def encoder_config(part: Part) -> Qwen3VLConfig:
    """transformers' config of the text encoder, with PyTorch's own attention. Raises Qwen21Error if it is another model's or damaged."""
    values, source = encoder_values(part), part.config_path if part.config is not None else part.source
    kind = values.get("model_type")
    if kind != "qwen3_vl":
        raise Qwen21Error(f"{source}: `model_type` is {kind!r}, expected 'qwen3_vl': take the text_encoder folder of a Qwen-Image 2.1 checkpoint")
    for key in ("text_config", "vision_config"):
        if not isinstance(values.get(key), dict):
            raise Qwen21Error(f"{source}: `{key}` is {values.get(key)!r}, expected an object: download the file again")
    with explained(str(source)):
        config = Qwen3VLConfig.from_dict(_both_rope_spellings(values))
        config._attn_implementation = "sdpa"
    return config


def processor_folder(part: Part, files: tuple[str, ...]) -> Path | None:
    """The folder that holds one of `files` for this text encoder: `processor` or `tokenizer` beside its folder, or where the weights are."""
    home = part.source if part.source.is_dir() else part.source.parent
    candidates = (home / "processor", home.parent / "processor", home / "tokenizer", home.parent / "tokenizer", home)
    return next((folder for folder in candidates if any((folder / file).is_file() for file in files)), None)


def read_picture_processor(part: Part, config: Qwen3VLConfig) -> PictureProcessor:
    """What turns pictures into the vision tower's patches; as published if the encoder is a single file without one.

    Raises Qwen21Error if it is damaged, missing from a folder, or made for another tower.
    """
    tower = config.vision_config
    folder = processor_folder(part, PROCESSOR_FILES)
    if folder is None and part.config is not None:
        raise Qwen21Error(f"{part.source.parent / 'processor' / PROCESSOR_FILES[1]} is missing: take the processor folder of a Qwen-Image 2.1 checkpoint")
    if folder is None:
        sizes = {"patch_size": tower.patch_size, "temporal_patch_size": tower.temporal_patch_size, "merge_size": tower.spatial_merge_size}
        return PictureProcessor.from_dict(_limits_in_both_words(published.PICTURES | sizes))
    for file in PROCESSOR_FILES:
        if (folder / file).is_file():
            read_json(folder / file)
    with explained(f"the picture processor in {folder}"):
        values, _ = PictureProcessor.get_image_processor_dict(folder, local_files_only=True)
        processor = PictureProcessor.from_dict(_limits_in_both_words(values))
        smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
    if not isinstance(smallest, int) or not isinstance(largest, int) or not 0 < smallest <= largest:
        raise Qwen21Error(f"the picture processor in {folder} has a `size` of {smallest} to {largest} pixels, expected a range: download it again")
    for ours, theirs in (("patch_size", "patch_size"), ("temporal_patch_size", "temporal_patch_size"), ("merge_size", "spatial_merge_size")):
        found, expected = getattr(processor, ours), getattr(tower, theirs)
        if found != expected:
            raise Qwen21Error(f"the picture processor in {folder} has `{ours}` {found}, the text encoder {expected}: the two come from different checkpoints")
    return processor


def _limits_in_both_words(values: dict) -> dict:
    """transformers 4.57 forgets the limits of area, unless it is told in the older words."""
    limits = values.get("size", {})
    return {"min_pixels": limits.get("shortest_edge"), "max_pixels": limits.get("longest_edge")} | values


def read_tokenizer(part: Part, config: Qwen3VLConfig, bundled: Path | None = None) -> Tokenizer:
    """The tokenizer that lies with the text encoder, else ComfyUI's own for Qwen: in `bundled`, or in the ComfyUI whose folder the file is in.

    Raises Qwen21Error if there is none, or it is damaged or not the one the text encoder was trained with.
    """
    folder = processor_folder(part, TOKENIZER_FILES)
    if folder is None:
        hosts = [parent / BUNDLED_TOKENIZER for parent in part.source.resolve().parents]
        folder = next((path for path in (bundled, *hosts) if path is not None and path.is_dir()), None)
    if folder is None and part.source.is_dir():
        raise Qwen21Error(f"{part.source.parent / 'processor' / TOKENIZER_FILES[0]} is missing: take the processor folder of a Qwen-Image 2.1 checkpoint")
    if folder is None:
        raise Qwen21Error(
            f"{part.source} comes without a tokenizer: put the {TOKENIZER_FILES[0]} of a Qwen-Image 2.1 checkpoint's processor folder beside it, or the file "
            "into ComfyUI's models/text_encoders"
        )
    with explained(f"the tokenizer in {folder}"):
        tokenizer = _read_tokenizer(folder)
    for token in TEMPLATE_TOKENS:
        if tokenizer.token_to_id(token) is None:
            raise Qwen21Error(f"the tokenizer in {folder} lacks the token {token}: take the processor folder of a Qwen-Image 2.1 checkpoint")
    known, words = tokenizer.get_vocab_size(with_added_tokens=True), config.text_config.vocab_size
    if known > words:
        raise Qwen21Error(f"the tokenizer in {folder} has {known} tokens, the text encoder {words}: the two come from different checkpoints")
    return tokenizer


def _read_tokenizer(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).backend_tokenizer


def _both_rope_spellings(config: dict) -> dict:
    """transformers 5 writes `rope_parameters`, 4.57 reads `rope_theta` and `rope_scaling`: give whichever is missing."""
    text = dict(config["text_config"])
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        text.setdefault("rope_theta", rope["rope_theta"])
        text.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    return config | {"text_config": text}


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever transformers and tokenizers raise inside on a damaged file, as a sentence about `what`."""
    try:
        yield
    except Qwen21Error:
        raise
    except Exception as error:
        raise Qwen21Error(f"{what} cannot be used ({one_line(error)}): download it again") from error
