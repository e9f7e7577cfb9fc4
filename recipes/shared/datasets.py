"""Data sets that several recipes share: the shipped ones, and your own files.

The sources of the shipped data are in `SOURCES.md`. Nothing is downloaded.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, default_collate

SHIPPED = {"digits": "digits.npz", "diabetes": "diabetes.npz", "breast_cancer": "breast_cancer.npz"}
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
MAX_16_BIT = 65535.0


def holdout(num_rows: int, split: str) -> np.ndarray:
    """Row numbers of a split: every fifth for `eval`, the others for `train`."""
    if split not in ("train", "eval"):
        raise ValueError(f"split is {split!r}; use 'train' or 'eval'")
    rows = np.arange(num_rows)
    return rows[(rows % 5 == 4) == (split == "eval")]


def one_batch(data: Dataset[Any]) -> list[Any]:
    """All samples as a single batch, for metrics that are not means over samples (R², recall, distances)."""
    return [default_collate([data[i] for i in range(len(data))])]  # type: ignore[arg-type]


# ---- tables --------------------------------------------------------------------------------------------------------


def read_columns(source: str) -> dict[str, np.ndarray]:
    """The numeric columns of a shipped table, or of a .csv, .parquet or .npz file. An empty cell is NaN."""
    path = Path(__file__).with_name(SHIPPED[source]) if source in SHIPPED else Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{source!r} is neither a file nor one of the shipped tables: {', '.join(SHIPPED)}")
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(f"{path.name} needs pyarrow. To fix: pip install pyarrow, or use a CSV file.") from error
        table = pyarrow.parquet.read_table(path)
        return {name: table[name].to_numpy().astype(np.float32) for name in table.column_names}
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} holds no rows below its header")
    return {name: np.array([float(row[name] or "nan") for row in rows], dtype=np.float32) for name in rows[0]}


def column(source: str, name: str) -> np.ndarray:
    """One column of a table, in its order: a series."""
    columns = read_columns(source)
    if name not in columns:
        raise KeyError(f"{source} has no column {name!r}; it has {', '.join(columns)}")
    return columns[name]


class Table(Dataset[tuple[Tensor, Tensor]]):
    """Rows of (features, target). Features are standardised by the training rows' mean and deviation; so is the target of a
    regression (`standardize_target`). `missing_rows` lists training rows whose first feature is missing (NaN).
    """

    def __init__(
        self,
        source: str,
        target: str,
        split: str,
        standardize_target: bool = False,
        missing_rows: Sequence[int] = (),
    ) -> None:
        targets = column(source, target).astype(np.float32)[:, None]
        columns = read_columns(source)
        features = np.stack([values for name, values in columns.items() if name != target], 1).astype(np.float32)
        train, rows = holdout(len(features), "train"), holdout(len(features), split)
        self.features = torch.from_numpy(_standardized(features, train)[rows])
        self.targets = torch.from_numpy((_standardized(targets, train) if standardize_target else targets)[rows])
        if split == "train":
            self.features[list(missing_rows), 0] = torch.nan

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.targets[index]


def _standardized(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    deviation = np.nanstd(values[rows], 0)
    return (values - np.nanmean(values[rows], 0)) / np.where(deviation > 0, deviation, 1)  # a constant column becomes 0


# ---- images --------------------------------------------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images with their class: (image [channels, height, width] between 0 and 1, label).

    `source` is `digits` (shipped, 1×8×8), or a folder with one folder of image files per class, which needs Pillow. A source
    with folders `train` and `eval` is split by these; otherwise every fifth image is for `eval`. `size` resizes to a square,
    and images of different sizes need it. `num_images` keeps only the first ones. `raw` lists images with unscaled 16-bit
    values, 0…65535; `true` means all of them.
    """

    def __init__(
        self,
        source: str,
        split: str,
        size: int | None = None,
        channels: int = 1,
        num_images: int | None = None,
        raw: bool | Sequence[int] = False,
    ) -> None:
        self.size, self.channels = size, channels
        self.images, self.labels = _digits(split) if source == "digits" else _image_files(Path(source), split)
        self.images, self.labels = self.images[:num_images], self.labels[:num_images]
        self.raw = set(range(len(self.images)) if raw is True else raw or ())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if isinstance(image, Path):
            image = _read_image(image, self.channels)
        if self.size is not None and image.shape[1:] != (self.size, self.size):
            image = F.interpolate(image[None], (self.size, self.size), mode="bilinear", antialias=True)[0]
        return image * MAX_16_BIT if index in self.raw else image, self.labels[index]


def _digits(split: str) -> tuple[Sequence[Tensor], Tensor]:
    columns = read_columns("digits")
    rows = holdout(len(columns["labels"]), split)
    images = torch.from_numpy(columns["images"][rows]).float().unsqueeze(1) / 16
    return images, torch.from_numpy(columns["labels"][rows]).long()  # type: ignore[return-value]


def _image_files(root: Path, split: str) -> tuple[Sequence[Path], Tensor]:
    root = root.expanduser()
    divided = (root / "train").is_dir() and (root / "eval").is_dir()
    top = root / split if divided else root
    if not top.is_dir():
        raise FileNotFoundError(f"there is no folder {top}; it must hold one folder of images per class")
    files: list[tuple[Path, int]] = []
    for label, folder in enumerate(sorted(path for path in top.iterdir() if path.is_dir())):
        found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        kept = found if divided else [found[row] for row in holdout(len(found), split)]
        files += [(path, label) for path in kept]
    if not files:
        raise ValueError(f"{top} holds no images for {split}; it must hold one folder of images per class")
    return [path for path, _ in files], torch.tensor([label for _, label in files])


def _read_image(path: Path, channels: int) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading image files needs Pillow. To fix: pip install pillow.") from error
    with Image.open(path) as file:
        pixels = np.array(file.convert("L" if channels == 1 else "RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels).reshape(*pixels.shape[:2], channels).permute(2, 0, 1)
