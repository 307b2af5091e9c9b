"""Run in a process of its own: commands of harmonic-sft and programs, one JSON object a line.

A command is a list of words, a program a text, and a block of a page, which shares the names of
the page's other blocks, an object with `page` and `code`.
"""

import contextlib
import functools
import gc
import io
import json
import logging
import os
import sys
import time
import traceback

import jinja2

import harmonic_sft.training.run  # noqa: F401
from harmonic_sft_cli import main

gc.freeze()  # collecting what is imported takes as long as a small run

time.sleep = lambda seconds: None  # the Hub's client waits between its tries
os.fsync = lambda descriptor: None
jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)  # for every card


pages: dict[str, dict] = {}


def run_program(code: str, names: dict) -> int:
    try:
        exec(code, names)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def run_command(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as ended:  # argparse does not know the words
        return int(ended.code or 0)


for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    logging.getLogger().handlers.clear()  # they write to the last command's stderr
    job = json.loads(line)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if isinstance(job, list):
            status = run_command(job)
        elif isinstance(job, str):
            status = run_program(job, {"__name__": "__main__"})
        else:
            status = run_program(job["code"], pages.setdefault(job["page"], {}))
    result = {"status": status, "out": out.getvalue(), "err": err.getvalue()}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
