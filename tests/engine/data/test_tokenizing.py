"""hookline tokenize: documents of text files, tokenizers, mistakes."""

import gzip
import json
import os

import numpy as np
import pytest

from hookline.cli import main
from hookline.engine.data.tokenizing import tokenize_files


def tokenize(*words):
    """The exit code of ``hookline tokenize``."""
    try:
        return main(["tokenize", *words]) or 0
    except SystemExit as end:
        return end.code


def documents(folder):
    tokens, ends = np.load(folder / "tokens.npy"), np.load(folder / "ends.npy")
    return [part.tolist() for part in np.split(tokens, ends[:-1])]


def doubled(text):
    return [2 * ord(letter) for letter in text]


doubled.vocab_size = 300


def unbounded(text):
    return [70000] if text == "high" else [-1] if text == "low" else list(text) if text == "word" else []


def failing(text):
    raise RuntimeError("no such letter")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes("ä\r\n".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two", "id": 2}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"body": "xyz"}\n'))
    (tmp_path / "d.txt").write_text("one\n\ntwo\r\n")
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))
    (tmp_path / "wrong.jsonl").write_text('{"text": "one"}\n{"text": 1}\n')
    (tmp_path / "torn.jsonl").write_text('{"text": "one"}\n{"text": "tw')
    (tmp_path / "plain.gz").write_text("one")
    return tmp_path


def as_text(folder):
    return [bytes(tokens).decode() for tokens in documents(folder)]


def test_a_file_or_a_line_is_a_document(files, capsys):
    assert tokenize("a.txt", "b.jsonl", "--output", "out/data") == 0
    assert as_text(files / "out/data") == ["ä\r\n", "one", "two"]
    assert capsys.readouterr().out == "Wrote out/data: 3 documents, 10 tokens of type uint8\n"
    assert tokenize("d.txt", "--lines", "--output", "lines") == 0
    assert as_text(files / "lines") == ["one", "two"]
    assert tokenize("c.jsonl.gz", "--field", "body", "--output", "field") == 0
    assert as_text(files / "field") == ["xyz"]


def test_a_function_and_an_end_token(files):
    assert (
        tokenize("d.txt", "--lines", "--output", "out", "--tokenizer", f"{__name__}:doubled", "--end-token", "7") == 0
    )
    assert documents(files / "out")[0] == [*doubled("one"), 7]
    assert np.load(files / "out/tokens.npy").dtype == np.uint16
    info = tokenize_files(["a.txt"], "bytes", end_token="256")
    assert (info["dtype"], info["vocab_size"]) == ("uint16", 257)


def test_workers_keep_the_order(files, monkeypatch):
    monkeypatch.setattr("hookline.engine.data.tokenizing._CHUNK", 300)
    texts = [str(number) * 3 for number in range(100)]
    (files / "many.txt").write_text("\n".join(texts))
    seen = []
    tokenize_files(["many.txt"], "two", lines=True, workers=2, progress=lambda *numbers: seen.append(numbers))
    assert as_text(files / "two") == texts
    assert len(seen) == 34
    assert seen[-1] == (100, 570)


def test_a_tokenizer_of_hugging_face(files):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "one": 1, "two": 2, "<end>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("words.json")
    assert tokenize("b.jsonl", "--output", "out", "--tokenizer", "words.json", "--end-token", "<end>") == 0
    assert documents(files / "out") == [[1, 3], [2, 3]]
    info = json.loads((files / "out/info.json").read_text())
    assert (info["vocab_size"], info["end_token"]) == (4, 3)
    assert info["tokenizer"].startswith("words.json sha256:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("d.txtt", "there is no file d.txtt; did you mean 'd.txt'?"),
        (".", ". is a folder; give its files, such as ./*.txt"),
        ("a.txt --output d.txt", "d.txt exists; choose another name"),
        ("a.txt --tokenizer byte", "tokenizer: unknown 'byte'; did you mean 'bytes'?"),
        ("a.txt --tokenizer none.json", "tokenizer: there is no file none.json"),
        ("b.jsonl --tokenizer b.json", "tokenizer: there is no file b.json"),
        ("a.txt --tokenizer nothing:here", "there is no module 'nothing'"),
        ("a.txt --end-token eos", "end token: bytes has no token 'eos'; give a number"),
        ("a.txt --end-token 300 --dtype uint8", "a.txt: the token 300 does not fit into uint8"),
        ("a.txt --workers -1", "workers: must be at least 0, not -1"),
        ("latin.txt", "latin.txt: is not text in UTF-8"),
        ("a.txt latin.txt --workers 2", "latin.txt: is not text in UTF-8"),
        ("plain.gz", "plain.gz: cannot be read: Not a gzipped file"),
        ("c.jsonl.gz", "c.jsonl.gz:1: has no text in the field 'text'; it has: body"),
        ("wrong.jsonl", "wrong.jsonl:2: has no text in the field 'text'"),
        ("torn.jsonl", "torn.jsonl:2: is not JSON: "),
        (f"a.txt --tokenizer {__name__}:failing", "a.txt: the tokenizer fails: RuntimeError: no such letter"),
        (f"a.txt --tokenizer {__name__}:failing --workers 1", "a.txt: the tokenizer fails: RuntimeError: no such"),
        (f"a.txt --tokenizer {__name__}:unbounded", "a.txt: there are no tokens"),
        (f"high.txt --tokenizer {__name__}:unbounded --dtype uint16", "high.txt: the token 70000 does not fit into"),
        (f"low.txt --tokenizer {__name__}:unbounded", "low.txt: the token -1 does not fit into uint32"),
        (f"word.txt --tokenizer {__name__}:unbounded", "word.txt: the tokenizer must return a list of ints"),
        ("a.txt --output latin.txt/out", "latin.txt/out: cannot be written: "),
    ],
)
def test_a_mistake_ends_with_one_line_and_leaves_nothing(files, capsys, words, message):
    for word in ("high", "low", "word"):
        (files / f"{word}.txt").write_text(word)
    before = sorted(os.listdir(files))
    output = [] if "--output" in words else ["--output", "out"]
    assert tokenize(*words.split(), *output) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(os.listdir(files)) == before
