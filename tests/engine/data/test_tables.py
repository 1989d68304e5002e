import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.data import table

ROWS = "age,city,income,happy\n10,Rome,1.5,yes\n30,Oslo,2.5,no\n\n20,Rome,3.5,yes\n"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "train.csv").write_text(ROWS)
    return str(tmp_path / "train.csv")


def test_numbers_are_standardized_and_categories_become_inputs(path):
    x, y = table(path, "happy", "classification", categories=["city"]).tensors
    assert y.tolist() == [1, 0, 1]
    assert x.dtype == torch.float32
    assert x[:, 2:].tolist() == [[0, 1], [1, 0], [0, 1]]  # Oslo, Rome
    assert x[:, 0].tolist() == pytest.approx([-(1.5**0.5), 1.5**0.5, 0])


def test_regression_has_numbers_as_targets(path):
    x, y = table(path, "income", "regression", features=["age"], standardize=False).tensors
    assert (x.tolist(), y.tolist()) == ([[10], [30], [20]], [[1.5], [2.5], [3.5]])


def test_a_test_file_is_read_like_the_training_file(path, tmp_path):
    (tmp_path / "test.csv").write_text("age,city,income,happy\n40,Bern,2.5,yes\n")
    x, y = table(str(tmp_path / "test.csv"), "happy", "classification", categories=["city"], like=path).tensors
    assert y.tolist() == [1]
    assert x.tolist() == [pytest.approx([2 * 1.5**0.5, 0, 0, 0])]


def test_parquet_files_have_the_same_rows(path, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"age": [10, 30, 20], "city": ["Rome", "Oslo", "Rome"], "income": [1.5, 2.5, 3.5], "happy": [1, 0, 1]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    for file in (path, str(tmp_path / "train.parquet")):
        x, y = table(file, "happy", "classification", categories=["city"]).tensors
        assert y.tolist() == [1, 0, 1]
        assert x[0].tolist() == pytest.approx([-(1.5**0.5), -(1.5**0.5), 0, 1])


def test_classes_that_are_numbers_are_sorted_as_numbers(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n1,10\n2,9\n3,10\n")
    assert table(str(tmp_path / "t.csv"), "y", "classification").tensors[1].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (ROWS, ("hapy", "classification"), r"has no column 'hapy'; did you mean 'happy'"),
        (
            ROWS,
            ("happy", "classification"),
            r"row 0, column 'city': 'Rome' is not a number; a column of text is one of",
        ),
        ("x,y\n1,2\n,3\n", ("y", "regression"), r"row 1, column 'x': '' is not a number"),
        ("x,y\n1,2,3\n", ("y", "regression"), r"line 2: 3 values for 2 columns"),
        ("x,y\n", ("y", "regression"), r"has no rows"),
        ("y\n1\n", ("y", "regression"), r"there is no input column besides 'y'"),
    ],
)
def test_errors_name_the_place(tmp_path, text, arguments, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        table(str(tmp_path / "t.csv"), *arguments)
