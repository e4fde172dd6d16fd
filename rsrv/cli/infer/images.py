"""Pictures as an input: decoded with Pillow (the extra ``images``) a few at a time, laid out as the model wants."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rsrv.cli.infer.wanted import Wanted
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

Layout = Literal["chw", "hwc", "hw"]
_MODES = {3: "RGB", 1: "L", 4: "RGBA"}
_WIDER_THAN_BYTES = ("I", "F")
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How pictures become numbers: ``(value × scale − mean) / std`` for values in 0..255; only a mean or a std without
    a scale means the scale 1/255, as does nothing at all for a model of floats."""

    size: tuple[int, int] | None = None
    """Width and height; None for the model's, else the pictures' own."""

    scale: float | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def parse(cls, size: str | None, scale: float | None, mean: str | None, std: str | None) -> ImageOptions:
        """From the texts of the options: ``224`` or ``320x240``; numbers with commas. Raises UsageError."""
        deviations = _numbers("--image-std", std)
        if 0 in deviations:
            raise UsageError(f"--image-std {std}: a standard deviation of 0")
        return cls(_size(size), scale, _numbers("--image-mean", mean), deviations)

    @property
    def changes_values(self) -> bool:
        return self.scale is not None or bool(self.mean or self.std)


class ImageRows:
    """Files of pictures, a row each; a range of rows is decoded when it is read.

    Raises UsageError, here for options and a model that cannot go together and for the first picture, and when rows
    are read for others; it names the file.
    """

    def __init__(self, wanted: Wanted, files: Sequence[Path], options: ImageOptions) -> None:
        _require_pillow(wanted, files[0])
        self._wanted = wanted
        self._files = files
        self._options = options
        self.dtype: np.dtype[Any] = np.dtype(np.uint8) if wanted.dtype is None else wanted.dtype
        if self.dtype.kind in "iu" and options.changes_values:
            raise wanted.refuse(f"--image-scale, -mean and -std are for floats; wanted {wanted.describe()}")
        if self.dtype.kind == "b" or self.dtype == np.int8:
            raise wanted.refuse(f"a picture has values of 0..255, which do not fit {wanted.describe()}")
        item = wanted.item
        self._layout, self._channels = layout_of(wanted) if item is not None else ("hwc", 3)
        for name, values in (("--image-mean", options.mean), ("--image-std", options.std)):
            if len(values) not in (0, 1, self._channels):
                raise wanted.refuse(f"{name} has {len(values)} numbers for {self._channels} channels")
        self._size = self._chosen_size(item)
        height, width = self._size[1], self._size[0]
        shapes = {
            "chw": (self._channels, height, width),
            "hwc": (height, width, self._channels),
            "hw": (height, width),
        }
        self._item = shapes[self._layout]
        self.shape: tuple[int, ...] = (len(files), *self._item)

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        from concurrent.futures import ThreadPoolExecutor

        files = self._files[rows]
        array = np.empty((len(files), *self._item), self.dtype)
        if len(files) < 2:
            for at, file in enumerate(files):
                array[at] = self._decoded(file)
            return array
        with ThreadPoolExecutor(_THREADS) as threads:  # Pillow decodes without the GIL
            for at, picture in enumerate(threads.map(self._decoded, files)):
                array[at] = picture
        return array

    def _chosen_size(self, item: tuple[int, ...] | None) -> tuple[int, int]:
        """Width and height: the model's where fixed, else the option's, else those of the first picture."""
        if item is None:
            item = (-1, -1, self._channels)
        height, width = item[1:] if self._layout == "chw" else item[:2]
        size = self._options.size
        if size is not None and not (width in (-1, size[0]) and height in (-1, size[1])):
            raise self._wanted.refuse(
                f"--image-size {size[0]}x{size[1]} (width and height), where {self._wanted.describe()} is wanted",
                hint="leave it out: pictures are scaled to what the model wants",
            )
        if size is None and min(height, width) < 0:
            with _opened(self._wanted, self._files[0]) as picture:
                size = picture.size
        size = size or (width, height)
        return size[0] if width < 0 else width, size[1] if height < 0 else height

    def _decoded(self, file: Path) -> np.ndarray:
        from PIL import Image

        with _opened(self._wanted, file) as picture:
            if picture.mode.startswith(_WIDER_THAN_BYTES):
                raise self._wanted.refuse(
                    f"{file} has more than 8 bits a channel (Pillow's mode {picture.mode})", hint="convert it to 8 bits"
                )
            if picture.size != self._size:
                if self._options.size is None and self._size_is_open():
                    (width, height), (w, h) = picture.size, self._size
                    raise self._wanted.refuse(
                        f"{file} is {width}x{height}, but {self._files[0]} is {w}x{h}",
                        hint=f"--image-size {w}x{h} scales all",
                    )
                picture = picture.convert(_MODES[self._channels]).resize(self._size, Image.Resampling.BILINEAR)
            array = np.asarray(picture.convert(_MODES[self._channels]))
        values = self._values(array.reshape((*array.shape[:2], self._channels)))
        if self._layout == "chw":
            return values.transpose(2, 0, 1)
        return values if self._layout == "hwc" else values[:, :, 0]

    def _size_is_open(self) -> bool:
        item = self._wanted.item
        if item is None:
            return True
        return -1 in (item[1:] if self._layout == "chw" else item[:2])

    def _values(self, bytes_: np.ndarray) -> np.ndarray:
        if self.dtype.kind in "iu":
            return bytes_
        options = self._options
        values = bytes_.astype(np.float32) * np.float32(1 / 255 if options.scale is None else options.scale)
        if options.mean:
            values -= np.array(options.mean, np.float32)
        if options.std:
            values /= np.array(options.std, np.float32)
        return values


def layout_of(wanted: Wanted) -> tuple[Layout, int]:
    """Where the channels of a picture go in a model's input, and how many they are. Raises UsageError."""
    item = wanted.item or ()
    if len(item) == 2:
        return "hw", 1
    if len(item) == 3:
        for (
            channels
        ) in _MODES:  # where both ends could be channels, colours are likelier than one, and transparency least
            if item[0] == channels:
                return "chw", channels
            if item[2] == channels:
                return "hwc", channels
    raise wanted.refuse(
        f"{wanted.describe()} is not the shape of a picture: height and width, 1, 3 or 4 channels before or behind",
        hint="make an .npy file of the pictures",
    )


def _require_pillow(wanted: Wanted, file: Path) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError:
        raise wanted.refuse(
            f"{file} is a picture, and Pillow, which reads them, is not installed", hint="pip install 'rsrv[images]'"
        ) from None


def _opened(wanted: Wanted, file: Path) -> Image.Image:
    """The picture in `file`, decoded and turned as its camera was. Raises UsageError."""
    import warnings

    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as picture:
                return ImageOps.exif_transpose(picture)
    except FileNotFoundError:
        raise wanted.refuse(f"there is no file {str(file)!r}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise wanted.refuse(f"{file} is too large for a picture: {error}") from None
    except Exception as error:  # decoders of damaged files raise whatever their parsing met
        why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise wanted.refuse(f"{file} is not a picture that can be read: {why}") from None


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(f"--image-size {text!r}: wanted 224, or width and height as in 320x240")
    return int(parts[0]), int(parts[-1])


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text!r}: wanted a number, or one for each channel with commas between") from None
    if not np.isfinite(values).all():
        raise UsageError(f"{option} {text!r}: wanted finite numbers")
    return values
