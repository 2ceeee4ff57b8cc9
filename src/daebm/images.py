"""Images: named sets of 28 x 28 grey images (checksummed, downloaded when missing), arrays, folders of pictures."""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from daebm.data import check_finite
from daebm.errors import InputError
from daebm.image_files import CONTENT, LETTERS_SOURCE, MIRRORS, PUBLISHED

DEBIAN = Path("/usr/share/dataset-fashion-mnist")  # the Debian package dataset-fashion-mnist
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff")
_PREFIXES = {"train": "train", "test": "t10k"}  # of the file names


def read_idx(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes; a name that ends in .gz is unpacked."""
    path = Path(path).expanduser()
    return _parsed(path, _unpacked(path)[1])


def load_images(
    name: str, split: str, data_dir: str | os.PathLike[str] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 28, 28), 0 = background, and labels from 0, of fashion-mnist, mnist, kmnist or emnist-letters.

    Looked for in ``data_dir``, the folder in DAEBM_DATA, the cache and Debian's package, in the folder itself and in
    its sub-folder fashion-mnist, mnist, kmnist or emnist; then downloaded into the cache. Checksums always count.
    emnist-letters has no train split. Its test split is the one of 14,800 images (the size in EMNIST's paper), sorted
    by class: 800 each of A to R, 400 of S, none of T to Z; images are turned upright, and label 0 is A.
    """
    images, labels = (_read(name, key, data_dir) for key in _keys(name, split))
    if name == "emnist-letters":  # stored transposed, with labels from 1
        images, labels = images.transpose(0, 2, 1).copy(), labels - 1
    return images, labels.astype(np.int64)


def image_array(x: Tensor | NDArray[Any]) -> Tensor:
    """Images as a tensor (n, c, h, w), c = 1 or 3: uint8 stays and means 0..255, floats must already be in [-1, 1]."""
    if isinstance(x, np.ndarray) and x.dtype.newbyteorder("=") in (np.uint8, np.float16, np.float32, np.float64):
        x = torch.from_numpy(np.array(x, dtype=x.dtype.newbyteorder("="), order="C"))  # a copy: x may be read-only
    if not isinstance(x, Tensor) or not (x.dtype == torch.uint8 or x.is_floating_point()):
        kind = f"{type(x).__name__} of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
        raise InputError(f"images must be a numpy or torch array of uint8 (0..255) or floats in [-1, 1], got {kind}")
    x = x.detach().cpu()
    if x.ndim == 3:
        x = x.unsqueeze(1)
    if x.ndim != 4 or x.numel() == 0 or x.shape[1] not in (1, 3):
        raise InputError(
            "images must have shape (n, h, w) or (n, c, h, w) with n >= 1 and 1 or 3 channels, "
            f"got {tuple(x.shape)}: reshape or permute them"
        )
    if x.dtype == torch.uint8:
        return x.contiguous()
    check_finite("the images", x)
    if x.min() < -1 or x.max() > 1:
        raise InputError(
            f"float images must lie in [-1, 1], got {float(x.min()):g} to {float(x.max()):g}: "
            "give 0..255 as uint8, or rescale (x / 127.5 - 1 for 0..255)"
        )
    return x.float().contiguous()


def image_folder(path: str | os.PathLike[str], size: int | None = None) -> Tensor:
    """All pictures under a folder, in the order of their paths, as a uint8 tensor (n, c, h, w), c = 1 or 3.

    With ``size`` each is cropped to its central square and resized; without, all must have one size already.
    """
    files = picture_files(path)
    images = [picture(file, size) for file in files]
    usual = Counter(image.shape for image in images).most_common(1)[0][0]
    for file, image in zip(files, images, strict=True):
        if image.shape != usual:
            raise InputError(
                f"{file} has channels, height and width {image.shape}, but most pictures there {usual}: "
                + ("convert it to grey or RGB like them" if image.shape[0] != usual[0] else "resize it or give size")
            )
    return torch.from_numpy(np.stack(images)).contiguous()


def picture_files(path: str | os.PathLike[str]) -> list[Path]:
    """All pictures under a folder, in the order of their paths."""
    root = Path(path).expanduser()
    if not os.path.isdir(root):
        raise InputError(f"{root} is not a folder: give one that holds pictures")
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise InputError(f"{root} holds no {', '.join(SUFFIXES)} file: give a folder that holds pictures")
    return files


def contact_sheet(x: NDArray[Any], seen: NDArray[Any]) -> bytes:
    """Images (n, h, w) or (n, c, h, w) side by side as a PNG, to be looked at.

    Black and white are 0 and 1, -1 and 1 or 0 and 255, as the values ``seen`` suggest, or else their least and largest.
    """
    low, high = float(seen.min()), float(seen.max())
    for black, white in ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)):
        if black <= low and high <= white:
            low, high = black, white
            break
    x = x[:, None] if x.ndim == 3 else x
    if x.shape[1] not in (1, 3):
        raise InputError(f"images with {x.shape[1]} channels are neither grey nor RGB: write them to an npy file")
    grey = np.clip((x - low) / (high - low) * 255, 0, 255).round().astype(np.uint8)
    zoom = max(1, round(100 / max(x.shape[2:])))  # pixels that can be seen
    tiles = np.pad(grey.repeat(zoom, 2).repeat(zoom, 3), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=128)
    across = math.ceil(math.sqrt(len(tiles)))
    down = math.ceil(len(tiles) / across)
    blank = np.full((across * down - len(tiles), *tiles.shape[1:]), 255, np.uint8)
    c, h, w = tiles.shape[1:]
    sheet = np.concatenate([tiles, blank]).reshape(down, across, c, h, w).transpose(0, 3, 1, 4, 2)
    sheet = sheet.reshape(down * h, across * w, c)
    buffer = io.BytesIO()
    Image.fromarray(sheet if c == 3 else sheet[..., 0]).save(buffer, "PNG")
    return buffer.getvalue()


def _unpacked(path: Path) -> tuple[bytes, bytes]:
    """The bytes of the file and those of its content, which differ for a .gz."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): check the path and its permissions") from error
    if path.suffix != ".gz":
        return raw, raw
    if raw[:2] != b"\x1f\x8b":
        raise InputError(f"{path} is not a gzip file: replace it, or drop .gz from its name if it is unpacked already")
    try:
        return raw, gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is a damaged or cut-off gzip file ({error}): delete or replace it") from error


def _parsed(path: Path, data: bytes) -> NDArray[np.uint8]:
    if data[:3] != b"\0\0\x08" or len(data) < 4 or not 1 <= data[3] <= 8:
        raise InputError(
            f"{path} is not an IDX file of unsigned bytes (it starts with {data[:4].hex(' ') or 'nothing'}, "
            "not 00 00 08 and the number of dimensions): give another file"
        )
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise InputError(f"{path} ends within its IDX header: delete or replace it")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    if len(data) - start != math.prod(shape) or 0 in shape:
        raise InputError(
            f"{path} should hold {' x '.join(map(str, shape))} bytes by its IDX header, "
            f"but holds {len(data) - start}: delete or replace it"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


def _keys(name: str, split: str) -> tuple[str, str]:
    """The image and label file of a split, as FOLDER/FILE without .gz."""
    if name not in MIRRORS:
        raise InputError(f"no image set is called {name!r}: choose one of {', '.join(MIRRORS)}")
    if split not in _PREFIXES:
        raise InputError(f"a split is called train or test, got {split!r}")
    if (name, split) == ("emnist-letters", "train"):
        raise InputError("emnist-letters has no train split here: use its test split of 14,800 images")
    stem = "emnist/emnist-letters-test" if name == "emnist-letters" else f"{name}/{_PREFIXES[split]}"
    return f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"


def _cache() -> Path:
    import pooch

    return Path(pooch.os_cache("daebm"))


def _folders(name: str, data_dir: str | os.PathLike[str] | None) -> Iterator[Path]:
    for what, given in (("data_dir", data_dir), ("--data-dir or DAEBM_DATA", os.environ.get("DAEBM_DATA") or None)):
        if given is not None:
            folder = Path(given).expanduser()
            if not os.path.isdir(folder):
                raise InputError(f"{what} names {folder}, which is not a folder: correct it or leave it out")
            yield folder
    yield _cache()
    if name == "fashion-mnist":
        yield DEBIAN


def _read(name: str, key: str, data_dir: str | os.PathLike[str] | None) -> NDArray[np.uint8]:
    looked = []
    for folder in _folders(name, data_dir):
        for place in (folder / key, folder / Path(key).name):
            for path in (place.with_name(place.name + ".gz"), place):
                if os.path.isfile(path) and (path.suffix == ".gz" or key in CONTENT):
                    return _checked(path, key)
        looked.append(str(folder))
    return _checked(_download(name, key, " or ".join(looked)), key)


def _checked(path: Path, key: str) -> NDArray[np.uint8]:
    raw, data = _unpacked(path)
    known, digest = CONTENT.get(key), sha256(data).hexdigest()
    if digest == known or (known is None and sha256(raw).hexdigest() == PUBLISHED[key]):
        return _parsed(path, data)
    other = next((other for other, sum_ in CONTENT.items() if sum_ == digest), None)
    if other is not None:  # MNIST's file names are those of its successors
        raise InputError(f"{path} is {other}, not {key}: keep each set in a sub-folder, and name the folder above it")
    source = f" ({LETTERS_SOURCE})" if key.startswith("emnist/") else ""
    raise InputError(f"{path} does not have the checksum of {key}: delete or replace it{source}")


def _download(name: str, key: str, looked: str) -> Path:
    import pooch  # slow to import, and seldom needed
    from requests import RequestException

    folder, file = _cache() / Path(key).parent, f"{Path(key).name}.gz"
    own = "put it into a folder that --data-dir (data_dir in Python) or the environment variable DAEBM_DATA names"
    if MIRRORS[name] is None:
        raise InputError(f"{file} is not in {looked} and has no download: {LETTERS_SOURCE}, and {own}")
    url = f"{MIRRORS[name]}/{file}"
    try:  # pooch moves a download to its place only once its checksum is found right
        return Path(pooch.retrieve(url, PUBLISHED[key], file, folder, progressbar=True))
    except RequestException as error:
        problem = type(error).__name__
    except OSError as error:
        problem = f"cannot write into {folder}: {error.strerror or error}"
    except ValueError:
        problem = "what came has another checksum"
    raise InputError(f"{file} is not in {looked}, and downloading it failed ({problem}): get {url} and {own}")


def picture(file: Path, size: int | None) -> NDArray[np.uint8]:
    """One picture as (c, h, w), upright as a viewer shows it: grey, also from a grey palette, or RGB; without alpha.

    With ``size`` it is cropped to its central square and resized.
    """
    if size is not None and size < 1:
        raise InputError(f"size must be at least 1, got {size}")
    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
    except Exception as error:  # Pillow's decoders raise whatever the damage led to
        raise InputError(f"cannot read the picture {file} ({type(error).__name__}): delete or replace it") from error
    if image.mode.startswith(("I", "F")):  # conversion would clip them
        raise InputError(f"{file} has more than 8 bits per channel (mode {image.mode}): convert it to 8 bits")
    palette = np.reshape(image.getpalette() or (0, 0, 1), (-1, 3))
    grey = image.mode in ("1", "L", "LA") or not np.ptp(palette, axis=1).any()
    image = image.convert("L" if grey else "RGB")
    if size is not None:
        image = ImageOps.fit(image, (size, size))
    pixels: NDArray[np.uint8] = np.array(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
