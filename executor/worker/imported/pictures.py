"""What a vision-language model is given of images, by family, in sizes alone; and what its towers make of them.

Where a model's code counts its patches' places in numbers that a tensor holds, these are given, as a collator may make
them beforehand. Not here: what is recorded of towers (towers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Inputs = dict[str, Any]


class Pictures(NamedTuple):
    """How a model is given images: `patches` of the tower a position of text, the positions of each image (0: as many
    as there are), the tower's inputs for (images, positions of each), and what text has beside its tokens for (batch,
    length). `windows` are layers whose attention sees a part of an image, and that part in patches. With `apart` the
    inputs say how an image is divided for these."""

    patches: int
    per_image: int
    made: Callable[..., Inputs]
    beside: Callable[[int, int], Inputs]
    windows: tuple[int, int] = (0, 0)


def pictures_of(config: Any) -> Pictures | None:
    """How the model of a configuration is given images; None of a family that is not known."""
    made = FAMILIES.get(config.model_type)
    return None if made is None else made(config)


def inputs_of(config: Any, batch: int, seq: int, images: int) -> Inputs:
    """All that a model is given of images beside `batch` sequences of `seq` tokens, `images` of them images'."""
    pictures = pictures_of(config)
    assert pictures is not None, config.model_type
    each = pictures.per_image or images
    return pictures.made(batch * images // each, each, apart=True) | pictures.beside(batch, seq)


def features(model: Any, batch: int, seq: int, images: int, precision: AbstractContextManager[Any]) -> Inputs:
    """The same, with what the towers made of the images in their place: of `images` positions a sequence."""
    pictures = pictures_of(model.config)
    assert pictures is not None, model.config.model_type
    with precision, torch.no_grad():
        found = model.get_image_features(**pictures.made(batch, pictures.per_image or images))
    if pictures.per_image:
        found.pooler_output = _of(images, found.pooler_output)
    return {"mm_encoder_outputs": {"image": found}} | pictures.beside(batch, seq)


def _of(positions: int, found: Any) -> Any:
    """Features of each image, of another number of positions."""
    if isinstance(found, Tensor):
        return found.new_empty((*found.shape[:-2], positions, found.shape[-1]))
    return type(found)(_of(positions, one) for one in found)


def tensors_of(inputs: Inputs, *, towers: bool = False) -> list[Tensor]:
    """All tensors among what a model is given, or those that towers made."""
    made = inputs.get("mm_encoder_outputs", {}).get("image", {})
    leaves = [] if towers else tree_leaves({key: one for key, one in inputs.items() if key != "mm_encoder_outputs"})
    return [one for one in (*leaves, *tree_leaves(list(dict(made).values()))) if isinstance(one, Tensor)]


def _on_grids(config: Any) -> Pictures:
    """Qwen's towers: patches of any number, of images one after the other."""
    vision = config.vision_config
    merged = vision.spatial_merge_size**2
    width = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    window = getattr(vision, "window_size", 0) // vision.patch_size
    narrow = vision.depth - len(getattr(vision, "fullatt_block_indexes", range(vision.depth)))

    def made(images: int, positions: int, *, apart: bool = False) -> Inputs:
        patches = images * positions * merged
        found = {
            "pixel_values": torch.zeros((patches, width)),
            "image_grid_thw": _numbers(images, 3),
            "image_cu_seqlens": _numbers(images + 1, of=torch.int32),
            "image_position_ids": _numbers(patches, 2),
        }
        if narrow:
            parts = images * -(-positions * merged // window**2) if apart else 1
            found["image_window_index"] = _numbers(images * positions)
            found["image_cu_window_seqlens"] = _numbers(parts + 1, of=torch.int32)
        else:
            found["image_interp_indices"] = _numbers(patches, 4)
            found["image_interp_weights"] = torch.zeros((patches, 4))
        return found

    def beside(batch: int, seq: int) -> Inputs:
        return {"position_ids": _numbers(3, batch, seq)}

    return Pictures(merged, 0, made, beside, (narrow, window**2))


def _of_one_size(config: Any) -> Pictures:
    """Towers whose images are all of one size, and so of as many positions."""
    vision = config.vision_config
    size, patch = (one[0] if isinstance(one, list | tuple) else one for one in (vision.image_size, vision.patch_size))
    each = int(getattr(config, "mm_tokens_per_image", None) or config.image_seq_length)

    def made(images: int, positions: int, *, apart: bool = False) -> Inputs:
        return {"pixel_values": torch.zeros((images, 3, size, size))}

    def beside(batch: int, seq: int) -> Inputs:
        return {"token_type_ids": _numbers(batch, seq)} if config.model_type == "gemma3" else {}

    return Pictures((size // patch) ** 2 // each, each, made, beside)


def _numbers(*shape: int, of: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=of)


FAMILIES: dict[str, Callable[[Any], Pictures]] = {
    "qwen2_5_vl": _on_grids,
    "qwen3_vl": _on_grids,
    "qwen3_vl_moe": _on_grids,
    "gemma3": _of_one_size,
    "internvl": _of_one_size,
}
"""By the type that a configuration names."""
