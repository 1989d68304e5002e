"""Turn text into a folder of tokens for the data set Tokens.

A .jsonl file has one document per line, any other file is one document.
"""

import argparse
import sys
import time

from hookline.command_line import slow_imports

EXAMPLE = """hookline tokenize books/*.txt --output data/books
  hookline tokenize web.jsonl.gz --output data/web --tokenizer gpt2.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="FILE", help="text in UTF-8, or .jsonl; also .gz")
    add("--output", required=True, metavar="FOLDER", help="the folder to write, which must not exist")
    add("--tokenizer", default="bytes", metavar="T", help="bytes, package.module:function, or a tokenizer's .json")
    add("--end-token", metavar="TOKEN", help="put after each document: a number, or a name")
    add("--field", default="text", metavar="NAME", help="the text in a line of .jsonl (%(default)s)")
    add("--lines", action="store_true", help="each line of a text file is a document")
    add("--dtype", choices=("uint8", "uint16", "uint32"), help="type of the numbers (from the vocabulary)")
    add("--workers", type=int, default=0, metavar="N", help="processes that tokenize (0: this one)")


def main(args: argparse.Namespace) -> None:
    """Write the folder, and print what is in it."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.data.tokenizing import tokenize_files
    last = time.monotonic()

    def progress(documents: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            sys.stderr.write(f"{documents:,} documents, {tokens:,} tokens\n")

    with config_errors_exit():
        info = tokenize_files(
            args.inputs,
            args.output,
            args.tokenizer,
            end_token=args.end_token,
            field=args.field,
            lines=args.lines,
            dtype=args.dtype,
            workers=args.workers,
            progress=progress,
        )
    print(f"Wrote {args.output}: {info['documents']:,} documents, {info['tokens']:,} tokens of type {info['dtype']}")
