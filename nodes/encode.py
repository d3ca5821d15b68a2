"""Qwen21Encode: prompt, negative prompt and reference pictures as CONDITIONING."""

import torch
from comfy_api.latest import io

from ..qwen21.errors import UsageError
from ..qwen21.pictures import MAX_REFERENCES
from ..qwen21.references import POLICIES, prepare
from .bridge_clip import encode_prompts, native_resolution, to_pictures
from .common import CATEGORY, say

NAMES = [f"image_{i}" for i in range(1, MAX_REFERENCES + 1)]


class Qwen21Encode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Qwen21Encode",
            display_name="Qwen-Image 2.1 Encode",
            category=CATEGORY,
            description="Reads prompt, negative prompt and up to 10 reference pictures with the text encoder. Call the pictures <image1>, <image2> ... in the "
            "prompt.",
            search_aliases=["qwen image 2.1", "prompt", "text encode", "edit", "reference images", "TextEncodeQwenImage21"],
            inputs=[
                io.Clip.Input("clip", tooltip="The CLIP of the Qwen-Image 2.1 Loader."),
                io.String.Input("prompt", multiline=True, dynamic_prompts=True, tooltip="What to paint, or how to change the pictures. Picture 1 is <image1>."),
                io.String.Input(
                    "negative_prompt",
                    multiline=True,
                    dynamic_prompts=True,
                    default="",
                    tooltip="What to steer away from. Only used when the sampler's cfg is not 1.",
                ),
                io.Combo.Input(
                    "size_policy",
                    options=list(POLICIES),
                    default="auto",
                    tooltip="auto: as official, but moves a reference off 1024 x 1024, where the model may return a near-copy. official: resampled to the area "
                    "of resolution. keep: own pixels, mirrored up to a multiple of 32, cropped again by Decode.",
                ),
                io.Int.Input(
                    "resolution",
                    default=0,
                    min=0,
                    max=4096,
                    step=32,
                    tooltip="References are resampled to an area of resolution x resolution pixels. 0: the model's native size.",
                ),
                io.Autogrow.Input(
                    "images",
                    optional=True,
                    template=io.Autogrow.TemplateNames(
                        io.Image.Input("image", tooltip="A reference picture. A fourth channel is kept as alpha; every frame of a batch counts."),
                        names=NAMES,
                        min=0,
                    ),
                ),
            ],
            outputs=[io.Conditioning.Output("positive", display_name="positive"), io.Conditioning.Output("negative", display_name="negative")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, clip, prompt: str, negative_prompt: str, size_policy: str, resolution: int, images: dict | None = None, **unknown) -> io.NodeOutput:
        if unknown:  # the queue passes keys on that no schema names
            raise UsageError(f"the input {min(unknown)} is not known: reference pictures are images.image_1 to images.{NAMES[-1]}")
        images = images or {}
        pictures = [picture for name in NAMES if name in images for picture in to_pictures(checked(name, images[name]))]
        if len(pictures) > MAX_REFERENCES:
            raise UsageError(
                f"{len(pictures)} reference pictures came in (every frame of a batch counts), the model takes at most {MAX_REFERENCES}: leave some out"
            )
        prepared = [prepare(picture, size_policy, resolution or native_resolution(clip)) for picture in pictures]
        for note in dict.fromkeys(one.note for one in prepared if one.note):
            say(note, cls.hidden.unique_id)
        conditionings = encode_prompts(clip, [prompt, negative_prompt], [one.picture for one in prepared])
        for conditioning in conditionings:
            conditioning[0][1]["qwen21_references"] = prepared
        return io.NodeOutput(*conditionings)


def checked(name: str, image) -> torch.Tensor:
    """`image` if it is an IMAGE of three or four channels; the queue lets anything through to growing inputs."""
    if isinstance(image, torch.Tensor) and image.ndim == 4 and image.shape[3] in (3, 4):
        return image
    found = f"a tensor of shape {tuple(image.shape)}" if isinstance(image, torch.Tensor) else repr(image)
    raise UsageError(f"images.{name} is {found}, expected pictures (batch, height, width, 3 or 4): connect an IMAGE")
