"""Pixels are those of transformers' own processors that use Pillow."""

import io
import sys
from typing import Any

import numpy as np
import pytest

from shoal_workers.data.errors import BadRowError, DataError
from shoal_workers.data.images import PixelSettings, make_pixels, read_pixel_settings

_IMAGE = np.random.default_rng(3).integers(0, 256, (37, 53, 3), np.uint8)


def _content(image: Any, kind: str = "png") -> bytes:
    out = io.BytesIO()
    if kind == "npy":
        np.save(out, image)
    else:
        pytest.importorskip("PIL").Image.fromarray(image).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT", {"size": {"height": 20, "width": 24}}),
        ("ViT", {"size": {"height": 20, "width": 24}, "resample": 3, "do_normalize": False}),
        ("CLIP", {"do_resize": False, "size": {"shortest_edge": 384}, "crop_size": {"height": 16, "width": 16}}),
        ("CLIP", {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}),
        ("CLIP", {"size": {"shortest_edge": 16}, "crop_size": {"height": 24, "width": 20}}),
        ("CLIP", {"do_resize": False, "size": {"shortest_edge": 16}, "crop_size": {"height": 44, "width": 41}}),
    ],
)
@pytest.mark.parametrize("shape", [(37, 53), (53, 37)])
def test_pixels_are_those_of_transformers(name: str, changes: dict[str, Any], shape: tuple[int, int]) -> None:
    pytest.importorskip("PIL")
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**changes)
    image = np.ascontiguousarray(_IMAGE.transpose(1, 0, 2) if shape == (53, 37) else _IMAGE)
    pixels = make_pixels(_content(image), read_pixel_settings(processor.to_dict(), {}), "image")
    opened = pytest.importorskip("PIL").Image.open(io.BytesIO(_content(image)))
    theirs = processor(opened, return_tensors="pt")["pixel_values"][0]
    assert pixels.shape == theirs.shape
    assert float((pixels - theirs).abs().max()) < 1e-5


def test_without_a_processor_the_size_is_that_of_the_model() -> None:
    settings = read_pixel_settings({}, {"image_size": [20, 24], "num_channels": 1})
    assert (settings.height, settings.width, settings.num_channels) == (20, 24, 1)
    assert read_pixel_settings({}, {}) == PixelSettings(height=224, width=224)


def test_an_array_of_the_right_size_needs_no_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    settings = PixelSettings(height=37, width=53)
    pixels = make_pixels(_content(_IMAGE, "npy"), settings, "image")
    assert np.allclose(pixels.numpy(), (_IMAGE.transpose(2, 0, 1) / 255 - 0.5) / 0.5, atol=1e-6)
    grey = make_pixels(_content(_IMAGE[..., 0], "npy"), settings, "image")
    assert np.array_equal(grey[2].numpy(), pixels[0].numpy())
    for content, height in ((_content(_IMAGE, "npy"), 20), (b"\x89PNG", 37)):
        with pytest.raises(ImportError, match=r"need the package pillow .*: pip install 'shoal\[images\]'"):
            make_pixels(content, PixelSettings(height=height, width=53), "image")


@pytest.mark.parametrize("kind", ["png", "bmp", "gif", "tiff", "webp"])
def test_kinds_of_files_are_read(kind: str) -> None:
    pytest.importorskip("PIL")
    flat = np.full((8, 8, 3), 200, np.uint8)
    pixels = make_pixels(_content(flat, kind), PixelSettings(height=8, width=8), "image")
    assert pixels.shape == (3, 8, 8) and float((pixels - (200 / 255 - 0.5) / 0.5).abs().max()) < 0.05
    grey = make_pixels(_content(flat[..., 0], "png"), PixelSettings(height=8, width=8, num_channels=1), "image")
    assert grey.shape == (1, 8, 8)


def test_what_is_no_image_is_named() -> None:
    pytest.importorskip("PIL")
    settings = PixelSettings(height=8, width=8)
    with pytest.raises(BadRowError, match=r"cat/7\.png is no image that can be read"):
        make_pixels(b"not an image", settings, "cat/7.png")
    with pytest.raises(BadRowError, match=r"is an array \[8, 8, 2\] of float64"):
        make_pixels(_content(np.zeros((8, 8, 2)), "npy"), settings, "image")
    with pytest.raises(BadRowError, match="is no image that can be read"):
        make_pixels(b"\x93NUMPY\x01\x00", settings, "image")
    with pytest.raises(DataError, match="without do_center_crop"):
        read_pixel_settings({"size": {"shortest_edge": 8}}, {})
    with pytest.raises(DataError, match="Shoal knows height and width"):
        read_pixel_settings({"size": {"longest_edge": 8}}, {})


_PLAIN = PixelSettings(height=6, width=4, scale=1.0, mean=(0.0,), std=(1.0,))


@pytest.mark.parametrize("kind", ["png", "tiff", "ppm"])
def test_grey_of_16_bits_has_the_upper_8(kind: str) -> None:
    grey = np.linspace(0, 65535, 24).astype(np.uint16).reshape(6, 4)
    pixels = make_pixels(_content(grey, kind), _PLAIN, "image")
    assert np.array_equal(pixels[1].numpy(), grey >> 8)
    assert len(np.unique(pixels)) == 24, "neither white nor black"


def test_pixels_whose_range_is_not_known_are_refused() -> None:
    for image, words in ((np.full((6, 4), 0.5, np.float32), "float numbers"), (np.full((6, 4), 7, np.int32), "32-bit")):
        with pytest.raises(
            BadRowError, match=rf"a\.tiff is no image that can be read: its pixels are {words}.*8 or 16"
        ):
            make_pixels(_content(image, "tiff"), _PLAIN, "a.tiff")


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_an_image_is_turned_as_its_exif_says(kind: str) -> None:
    image = pytest.importorskip("PIL.Image").fromarray(np.repeat(np.arange(0, 240, 10, np.uint8).reshape(4, 6), 1, 1))
    shown: dict[int, Any] = {}
    for orientation in (1, 3, 6, 8):
        exif = image.getexif()
        exif[0x0112] = orientation
        out = io.BytesIO()
        image.convert("RGB").save(out, kind, exif=exif, **({"lossless": True} if kind == "webp" else {"quality": 100}))
        size = {"height": 4, "width": 6} if orientation < 5 else {"height": 6, "width": 4}
        settings = PixelSettings(**size, scale=1.0, mean=(0.0,), std=(1.0,))
        shown[orientation] = make_pixels(out.getvalue(), settings, "image")[0].numpy()
    for orientation, turns in ((3, 2), (6, 3), (8, 1)):
        assert np.abs(np.rot90(shown[1], turns) - shown[orientation]).max() <= 3, orientation


def test_transparency_is_dropped_as_pillow_does() -> None:
    image = np.zeros((6, 4, 4), np.uint8)
    image[..., 0], image[..., 3] = 200, 0
    assert make_pixels(_content(image), _PLAIN, "image")[0].unique().tolist() == [200.0]
