"""Rows of a data set, from files on this machine or from the Hugging Face Hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

EXTENSIONS = ("jsonl", "json", "parquet", "arrow")
# Where a split's files may be, in the order of preference: one file; shards; the Hub's `data/`
# folder; the folder that `Dataset.save_to_disk` writes.
_LAYOUTS = (
    "{stem}.{ext}",
    "{stem}-[0-9]*-of-[0-9]*.{ext}",
    "data/{stem}-[0-9]*-of-[0-9]*.{ext}",
    "{stem}/data-[0-9]*-of-[0-9]*.{ext}",
)


def read(
    path: str | None,
    split: str,
    name: str,
    *,
    configuration: str | None = None,
    stems: Sequence[str] = (),
) -> list[Row]:
    """The rows of one split, in the order of their files.

    Args:
        path: a local file or folder; no network is used then. None: the Hub's data set `name`.
        split: "train", "test" ...: of the Hub, and what a local file is called.
        name: data set on the Hub ("owner/name").
        configuration: of the Hub's data set, where it has several.
        stems: what else local files may be called, before `split` is tried ("aime24" finds
            aime24.jsonl, aime24-00000-of-00002.parquet, data/aime24-00000-of-00001.parquet,
            aime24/data-00000-of-00001.arrow).

    A `path` that is a file is read whole, whatever its name.

    Raises FileNotFoundError if there is no such file, ValueError for a file that can't be read as
    rows, ConnectionError if the Hub can't be read.
    """
    if path is None:
        return _from_hub(name, configuration, split)
    files = find(Path(path).expanduser(), (*stems, split))
    return [row for file in files for row in _rows(file)]


def find(source: Path, stems: Sequence[str]) -> list[Path]:
    """The files of a split: `source` itself if it is a file, else those of the first stem found.

    Raises FileNotFoundError, which names what was looked for.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"no such file or folder: {source}")
    for stem in stems:
        for extension in EXTENSIONS:
            for layout in _LAYOUTS:
                files = sorted(source.glob(layout.format(stem=stem, ext=extension)))
                if files:
                    return files
    names = " or ".join(f"{stem}.jsonl" for stem in stems)
    raise FileNotFoundError(f"no {names}, .json, .parquet or .arrow in {source}")


def field(row: Row, *names: str) -> Any:
    """The first of the fields `names` that `row` has; ValueError if it has none of them."""
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"a row has no field {' or '.join(names)}; it has {', '.join(row)}")


def _rows(file: Path) -> list[Row]:
    # `load_dataset` would report the load to the Hub (seconds of waiting without a network) and
    # copy the rows into a cache in the home folder
    if file.suffix == ".parquet":
        from datasets import IterableDataset

        rows = list(IterableDataset.from_parquet([str(file)]))
    elif file.suffix == ".arrow":
        from datasets import Dataset

        rows = list(Dataset.from_file(str(file)))
    else:
        rows = _from_json(file)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file} must hold one object a line, or a list of objects")
    return [dict(row) for row in rows]


def _from_json(file: Path) -> list[Any]:
    """One object a line, or one list of them: files called .json hold either."""
    text = file.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} of {file} is no JSON: {error}") from error
    return rows


def _from_hub(name: str, configuration: str | None, split: str) -> list[Row]:
    from datasets import load_dataset

    try:
        return [dict(row) for row in load_dataset(name, configuration, split=split)]
    except Exception as error:  # the Hub's client raises its own, and its HTTP library's, classes
        raise ConnectionError(
            f"could not load {split!r} of {name!r} from the Hugging Face Hub ({error}). With the "
            f"data on disk, give its folder, which holds {split}.jsonl (or .json, .parquet, "
            ".arrow), or its file: task.path=FOLDER"
        ) from error
