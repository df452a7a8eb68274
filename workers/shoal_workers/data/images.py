"""From the content of an image file to the pixels that a model of transformers reads, as its preprocessor_config.json
says: resize, cut the centre, scale, normalise.

The steps and their results are those of transformers' processors that use Pillow. They are done here because the
installed transformers decides by what else is installed (torchvision) how it resizes, and nodes must agree. What a
file shows, Pillow decides: it is turned as its EXIF says, and transparency is dropped. An array in NumPy's format
(.npy) needs no Pillow, unless it is resized. Called by the task that classifies images.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_workers.data.errors import BadRowError, DataError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".npy", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""Files of a folder with these endings are images."""
_BILINEAR = 2
_NUMPY = b"\x93NUMPY"
_DEFAULT_SIZE = 224


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSettings:
    """What is done with an image."""

    height: int
    width: int
    """Size of the result."""
    shortest_edge: int | None = None
    """The image is resized to this shorter edge, and its centre is cut out; None if it is resized to height x width."""
    resizes: bool = True
    resample: int = _BILINEAR
    """As in Pillow."""
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5,)
    """One number for each channel, or one for all."""
    std: tuple[float, ...] = (0.5,)
    num_channels: int = 3


def read_pixel_settings(processor: Mapping[str, Any], config: Mapping[str, Any]) -> PixelSettings:
    """From the content of preprocessor_config.json ({}: there is none) and of config.json.

    Raises:
        DataError: it has a step that is not known here.
    """
    size, crop = processor.get("size"), processor.get("crop_size")
    side = config.get("image_size")
    default = _rectangle(side if isinstance(side, int | list | tuple) else _DEFAULT_SIZE)
    shortest, (height, width) = None, default
    if isinstance(size, Mapping) and "shortest_edge" in size:
        shortest = int(size["shortest_edge"])
        if not processor.get("do_center_crop"):
            raise DataError(
                f"preprocessor_config.json has size {dict(size)} without do_center_crop, so images would have "
                "different sizes. Set size to height and width there."
            )
        height, width = _rectangle(crop if crop is not None else shortest)
    elif size is not None:
        height, width = _rectangle(size)
    return PixelSettings(
        height=height,
        width=width,
        shortest_edge=shortest,
        resizes=bool(processor.get("do_resize", True)),
        resample=_BILINEAR if (chosen := processor.get("resample")) is None else int(chosen),
        scale=float(processor.get("rescale_factor") or 1 / 255) if processor.get("do_rescale", True) else 1.0,
        mean=_channels(processor, "image_mean", 0.5) if processor.get("do_normalize", True) else (0.0,),
        std=_channels(processor, "image_std", 0.5) if processor.get("do_normalize", True) else (1.0,),
        num_channels=int(config.get("num_channels") or 3),
    )


def _rectangle(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        if "height" not in size or "width" not in size:
            raise DataError(
                f"preprocessor_config.json has the size {dict(size)}, and Shoal knows height and width, or "
                "shortest_edge. Write one of these."
            )
        return int(size["height"]), int(size["width"])
    pair = list(size) if isinstance(size, Sequence) else [size, size]
    return int(pair[0]), int(pair[1])


def _channels(processor: Mapping[str, Any], key: str, default: float) -> tuple[float, ...]:
    given = processor.get(key)
    if given is None:
        return (default,)
    return tuple(map(float, given)) if isinstance(given, Sequence) else (float(given),)


def make_pixels(content: bytes, settings: PixelSettings, place: str) -> Tensor:
    """(channels, height, width) fp32.

    Raises:
        BadRowError: it is no image.
        ImportError: Pillow is not installed, and it is needed.
    """
    image = decoded(content, settings, place)
    if settings.resizes:
        image = _resized(image, settings)
    if image.shape[:2] != (settings.height, settings.width):
        image = _centre(image, settings.height, settings.width)
    mean, std = (np.asarray(values, np.float32) for values in (settings.mean, settings.std))
    pixels = (image.astype(np.float32) * np.float32(settings.scale) - mean) / std
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32))


def decoded(content: bytes, settings: PixelSettings, place: str) -> NDArray[Any]:
    """(H, W, channels) uint8, as the image is stored. Raises as `make_pixels`."""
    try:
        if content.startswith(_NUMPY):
            array = np.load(io.BytesIO(content), allow_pickle=False)
            return _of_channels(array if array.ndim == 3 else array[..., None], settings, place)
        pillow = _pillow()
        with pillow.Image.open(io.BytesIO(content)) as image:
            upright = _in_8_bits(pillow.ImageOps.exif_transpose(image), image.format, pillow)
            array = np.asarray(upright.convert("L" if settings.num_channels == 1 else "RGB"))
            return array.reshape(*array.shape[:2], -1)
    except (ImportError, BadRowError):
        raise
    except Exception as error:  # the plug-ins of Pillow raise what they meet in a damaged file: SyntaxError, KeyError
        raise BadRowError(f"{place} is no image that can be read: {error}. Write it again, or remove it.") from error


def _in_8_bits(image: Any, format: str, pillow: Any) -> Any:
    """Return the image, whose 16 bits of grey become their upper 8, as Pillow does with those of colours."""
    is_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and format == "PPM")
    if image.mode in ("I", "F") and not is_16_bits:
        kind = "32-bit whole numbers" if image.mode == "I" else "float numbers"
        raise ValueError(f"its pixels are {kind}, whose range is not known. Write them with 8 or 16 bits")
    return pillow.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if is_16_bits else image


def _of_channels(array: NDArray[Any], settings: PixelSettings, place: str) -> NDArray[Any]:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, settings.num_channels):
        raise BadRowError(
            f"{place} is an array {list(array.shape)} of {array.dtype}. An image is uint8 with the shape "
            f"(height, width) or (height, width, {settings.num_channels})."
        )
    return np.repeat(array, settings.num_channels // array.shape[2], axis=2)


def _resized(image: NDArray[Any], settings: PixelSettings) -> NDArray[Any]:
    height, width = image.shape[:2]
    if settings.shortest_edge is None:
        to = (settings.height, settings.width)
    else:
        short, long = sorted((height, width))
        longer = int(settings.shortest_edge * long / short)
        to = (settings.shortest_edge, longer) if height <= width else (longer, settings.shortest_edge)
    if to == (height, width):
        return image
    pillow = _pillow()
    flat = image[..., 0] if image.shape[2] == 1 else image
    resized = pillow.Image.fromarray(flat).resize((to[1], to[0]), pillow.Image.Resampling(settings.resample))
    return np.asarray(resized).reshape(*to, -1)


def _centre(image: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Return the middle of an image; what lies outside of it is black."""
    missing = [max(0, wanted - has) for wanted, has in zip((height, width), image.shape, strict=False)]
    before = [-(-channel // 2) for channel in missing]
    pads = [(first, all_ - first) for first, all_ in zip(before, missing, strict=True)]
    image = np.pad(image, (*pads, (0, 0)))
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ImportError(
            f"images need the package pillow ({error}). Install it on every node: pip install 'shoal[images]'. Or "
            "write them as arrays (.npy, uint8) of the size that the model reads."
        ) from error
    return PIL
