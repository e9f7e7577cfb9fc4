"""The data sets that recipes share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from safetrain.config import import_target

ROOT = Path(__file__).parents[2]
FILE = ROOT / "recipes" / "shared" / "datasets.py"


def get(name: str):
    return import_target(f"{FILE}:{name}")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    rows = [f"{i},{i * i},{i % 2}" for i in range(20)]
    rows[3] = "3,,1"
    path.write_text("a,b,y\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_splits_share_no_row_and_together_hold_every_row():
    holdout = get("holdout")
    train, evaluation = holdout(23, "train"), holdout(23, "eval")
    assert sorted([*train, *evaluation]) == list(range(23))
    assert len(evaluation) == 4
    with pytest.raises(ValueError, match="'train' or 'eval'"):
        holdout(23, "test")


@pytest.mark.parametrize(("name", "rows", "columns"), [("diabetes", 442, 11), ("breast_cancer", 569, 31)])
def test_shipped_tables(name: str, rows: int, columns: int):
    read = get("read_columns")(name)
    assert len(read) == columns
    assert {len(values) for values in read.values()} == {rows}
    assert all(np.isfinite(values).all() for values in read.values())


def test_a_csv_file_is_read_and_an_empty_cell_is_nan(table: Path):
    columns = get("read_columns")(str(table))
    assert list(columns) == ["a", "b", "y"]
    assert columns["a"].tolist() == list(range(20))
    assert np.isnan(columns["b"]).nonzero()[0].tolist() == [3]
    assert get("column")(str(table), "y").tolist() == [i % 2 for i in range(20)]


def test_a_parquet_file_is_read(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": [1, 2], "y": [0.5, 1.5]}), tmp_path / "t.parquet")
    columns = get("read_columns")(str(tmp_path / "t.parquet"))
    assert {name: values.tolist() for name, values in columns.items()} == {"a": [1, 2], "y": [0.5, 1.5]}


def test_a_missing_source_is_an_error(tmp_path: Path, table: Path):
    with pytest.raises(FileNotFoundError, match="neither a file nor one of the shipped tables"):
        get("read_columns")(str(tmp_path / "nothing.csv"))
    with pytest.raises(KeyError, match="has no column 'z'; it has a, b, y"):
        get("column")(str(table), "z")


def test_features_are_standardised_by_the_training_rows(table: Path):
    train = get("Table")("diabetes", "progression", "train", standardize_target=True)
    evaluation = get("Table")("diabetes", "progression", "eval", standardize_target=True)
    assert len(train) + len(evaluation) == 442
    torch.testing.assert_close(train.features.mean(0), torch.zeros(10), atol=1e-4, rtol=0)
    torch.testing.assert_close(train.features.std(0, correction=0), torch.ones(10), atol=1e-4, rtol=0)
    assert evaluation.features.mean(0).abs().max() > 1e-3  # by the training rows' statistics, not by its own
    assert train.targets.mean().abs() < 1e-4


def test_a_missing_cell_affects_only_its_row(table: Path):
    data = get("Table")(str(table), "y", "train")
    bad = [i for i in range(len(data)) if not data[i][0].isfinite().all()]
    assert bad == [3]


def test_missing_rows_are_those_listed():
    data = get("Table")("diabetes", "progression", "train", missing_rows=[7, 9])
    assert data.features.isnan().nonzero().tolist() == [[7, 0], [9, 0]]


def test_digits_are_between_0_and_1_and_raw_ones_are_not():
    data = get("Images")("digits", "train", raw=[2])
    image, label = data[0]
    assert image.shape == (1, 8, 8)
    assert 0.9 < image.max() <= 1
    assert label.dtype == torch.long
    assert data[2][0].max() > 60000
    assert get("Images")("digits", "train", raw=True)[0][0].max() > 60000
    assert len(get("Images")("digits", "eval", num_images=10)) == 10
    assert get("Images")("digits", "eval", size=16)[0][0].shape == (1, 16, 16)


@pytest.mark.parametrize("divided", [False, True])
def test_a_folder_of_images(tmp_path: Path, divided: bool):
    image_module = pytest.importorskip("PIL.Image")
    for split in ("train", "eval") if divided else (".",):
        for label, name in enumerate(("ant", "bee")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(10):
                image_module.new("RGB", (12, 8), (255 * label, 0, 0)).save(folder / f"{i}.png")
            (folder / "notes.txt").write_text("no image", encoding="utf-8")
    train = get("Images")(str(tmp_path), "train", size=8, channels=3)
    evaluation = get("Images")(str(tmp_path), "eval", size=8, channels=1)
    assert (len(train), len(evaluation)) == ((20, 20) if divided else (16, 4))
    image, label = train[len(train) - 1]
    assert image.shape == (3, 8, 8)
    assert (label, image[0].mean(), image[1].mean()) == (1, 1, 0)
    assert evaluation[0][0].shape == (1, 8, 8)


def test_a_folder_without_images_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="one folder of images per class"):
        get("Images")(str(tmp_path / "nothing"), "train")
    with pytest.raises(ValueError, match="holds no images"):
        get("Images")(str(tmp_path), "train")


def test_one_batch_holds_all_samples():
    data = get("Images")("digits", "eval", num_images=7)
    (batch,) = get("one_batch")(data)
    assert batch[0].shape == (7, 1, 8, 8)
    assert batch[1].tolist() == data.labels.tolist()
