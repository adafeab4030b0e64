"""Writes the datasets that the reader's test opens, with Hugging Face's own writer.

usage: python make.py   (made with datasets 5.1, pyarrow 26)
"""
import pathlib

from datasets import Dataset, DatasetDict, Features, LargeList, List, Value

HERE = pathlib.Path(__file__).parent

# Wide lists, booleans, and columns of other kinds around them.
mixed = Dataset.from_dict(
    {
        "id": ["a", "bb", "ccc"],
        "input_ids": [[1, 2, 3], [4], [5, 600000]],
        "meta": [{"x": 1, "y": ["q"]}, {"x": 2, "y": []}, {"x": 3, "y": ["r", "s"]}],
        "loss_mask": [[False, True, True], [True], [False, True]],
    },
    features=Features(
        {
            "id": Value("string"),
            "input_ids": LargeList(Value("int64")),
            "meta": {"x": Value("int64"), "y": List(Value("string"))},
            "loss_mask": LargeList(Value("bool")),
        }
    ),
)
mixed.save_to_disk(HERE / "mixed")

# Shards of a shuffled selection, which start inside the lists they were cut from; empty rows.
rows = [list(range(length % 5)) for length in range(40)]
cut = Dataset.from_dict(
    {
        "input_ids": [[index, *row] if row else [] for index, row in enumerate(rows)],
        "loss_mask": [[1, *(value % 2 for value in row)] if row else [] for row in rows],
    }
)
cut = cut.select(range(10, 30))
cut.set_format(type="torch")
cut.save_to_disk(HERE / "cut", num_shards=2)

DatasetDict({"train": Dataset.from_dict({"input_ids": [[1]]})}).save_to_disk(HERE / "splits")
