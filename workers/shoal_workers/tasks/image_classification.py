"""The task that trains a classifier of images of transformers (ViT, ResNet).

    task: shoal_workers.tasks.image_classification:ImageClassification
    model: {path: /models/tiny-vit, num_labels: 10}
    data: {folder: /images/train, validation_folder: /images/test}     a directory for each class
    data: {paths: [/images/*.parquet], flip: true}                     {"image": content of a file, "label": class}

Images of a folder stay where they are, and are read when they are needed; those of rows are copied to the local disk
once per node. Each is decoded once before, so that a damaged one is refused with its place, or left out; those of a
folder only with `bad_rows: skip`. Their size and normalisation are those of preprocessor_config.json in model.path
(data/images.py).
Loaded by the engine by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal_workers.contract.hugging_face import config_of
from shoal_workers.contract.text_data import BadRows, ImageClassModelConfig, ImagesConfig
from shoal_workers.data.errors import BadRowError, MissingTextError
from shoal_workers.data.images import SUFFIXES, PixelSettings, decoded, make_pixels, read_pixel_settings
from shoal_workers.data.labelled import Labelled, prepare, prepare_rows, read_unchanged
from shoal_workers.data.records import Record
from shoal_workers.data.tokenizer import Split, choose_split
from shoal_workers.tasks.class_heads import Classifier, directories_in
from shoal_workers.tasks.rows import FlippedSamples, RowSamples, read_class

_PROCESSOR = "preprocessor_config.json"
_IMAGES_AT_ONCE = 1024
_SIZE = "\0"
"""Stands between the name of a file and its size."""


class ImageClassification(Classifier):
    """Classes of images."""

    auto_class = "AutoModelForImageClassification"
    exported_files = (_PROCESSOR,)

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.settings = ImageClassModelConfig.model_validate(model)
        self.images = ImagesConfig.model_validate(data)
        folder = self.images.folder
        super().__init__(self.settings, self.images.classes or (directories_in(folder) if folder else ()))
        self._seed = seed

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Find the images of the folders, or copy those of the rows, unless that was done before."""
        classes, num_labels = self.classes()
        pixels = self.pixel_settings()
        if self.images.folder is not None:
            images = list(self._in_folders(progress))
            described = [images, self.images.bad_rows]
            self._examples = prepare(self.images, "images", described, self._checked(images, pixels), progress)
            return
        self._examples = prepare_rows(
            self.images,
            (self.images.image_field, self.images.label_field),
            "images",
            [classes, num_labels, pixels.num_channels],
            lambda record: _stored(record, classes, num_labels, pixels),
            progress,
        )

    def _in_folders(self, progress: Callable[[str], None]) -> Iterator[tuple[str, int, bool]]:
        """Name and size of each image, its class, and whether it is for validation."""
        names, _ = self.classes()
        for number, folder in enumerate((self.images.folder, self.images.validation_folder)):
            if folder is None:
                continue
            count = 0
            if not self.images.classes and (others := set(directories_in(folder)) - {*names}):
                raise MissingTextError(
                    f"{folder!r} has directories that are no classes of data.folder: {', '.join(sorted(others)[:4])}. "
                    "Name the classes that count in data.classes, or remove them."
                )
            for label, name in enumerate(names):
                progress(f"listing images: {count:,} so far, next {name}")
                for path, size in _images_in(Path(folder).expanduser(), name):
                    count += 1
                    sized = f"{number}/{path}{_SIZE}{size}"
                    is_held_back = choose_split(path.encode(), self.images.validation_fraction) is Split.VALIDATION
                    yield sized, label, bool(number) or (self.images.validation_folder is None and is_held_back)
            if not count:
                raise MissingTextError(
                    f"data.folder {folder!r} has no image below {', '.join(names[:4])} on this node. It must have a "
                    f"directory for each class, with files {', '.join(sorted(SUFFIXES))}, on every node."
                )

    def _checked(
        self, images: Sequence[tuple[str, int, bool]], pixels: PixelSettings
    ) -> Iterator[tuple[Labelled | BadRowError, bool]]:
        def check(image: tuple[str, int, bool]) -> tuple[Labelled | BadRowError, bool]:
            sized, label, is_validation = image
            try:
                if self.images.bad_rows is BadRows.SKIP:
                    content, place = self._read(sized)
                    decoded(content, pixels, place)
            except BadRowError as error:
                return error, is_validation
            return Labelled(sized.encode(), (label,)), is_validation

        with ThreadPoolExecutor(thread_name_prefix="shoal-images") as pool:  # Pillow decodes without Python's lock
            for start in range(0, len(images), _IMAGES_AT_ONCE):
                yield from pool.map(check, images[start : start + _IMAGES_AT_ONCE])

    def build_dataset(self, split: str) -> RowSamples | FlippedSamples:
        """Samples: `pixels` (channels, height, width), `label` (); "train" or "validation".

        Raises:
            DataError: the images cannot be found, or there is none for training.
        """
        pixels = self.pixel_settings()
        samples = RowSamples(self.examples(), split, lambda *sample: self._sample(pixels, *sample), str(pixels))
        return FlippedSamples(samples, self._seed) if self.images.flip and split == Split.TRAIN else samples

    def pixel_settings(self) -> PixelSettings:
        """How images are resized and normalised."""
        settings = self.files_beside((_PROCESSOR,))
        processor = json.loads(Path(settings[_PROCESSOR]).read_bytes()) if settings else {}
        return read_pixel_settings(processor, config_of(self.settings))

    def _sample(self, pixels: PixelSettings, payload: bytes, labels: NDArray[Any]) -> dict[str, Tensor]:
        content, place = payload, "an image of data.paths"
        if self.images.folder is not None:
            content, place = self._read(payload.decode())
        return {"pixels": make_pixels(content, pixels, place), "label": torch.tensor(int(labels[0]))}

    def _read(self, sized: str) -> tuple[bytes, str]:
        """Content of an image of a folder, and its path."""
        name, _, size = sized.partition(_SIZE)
        number, _, path = name.partition("/")
        folder = self.images.validation_folder if int(number) else self.images.folder
        file = Path(folder or "").expanduser() / path
        return read_unchanged(file, int(size)), str(file)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross entropy (nats) of the labels, and the metric `accuracy`."""
        return self.judged(model(pixel_values=batch["pixels"]), batch["label"])


def _images_in(folder: Path, name: str) -> Iterator[tuple[str, int]]:
    """Path below the folder and size of each image of a class, in order of their names."""
    for file in sorted((folder / name).rglob("*")):
        if file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
            yield file.relative_to(folder).as_posix(), file.stat().st_size


def _stored(record: Record, classes: tuple[str, ...], num_labels: int, pixels: PixelSettings) -> Labelled:
    image, label = record.values
    content = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes) or not content:
        has = f"an object with {', '.join(image)}" if isinstance(image, dict) else type(image).__name__
        raise BadRowError(
            f"{record.place}: data.image_field is {has}, not the content of an image. Write the bytes of the file."
        )
    decoded(content, pixels, record.place)
    return Labelled(content, (read_class(label, record.place, classes, num_labels),))
