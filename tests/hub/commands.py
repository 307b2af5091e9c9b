"""Run in a process of its own: commands of harmonic-sft and programs, one JSON object a line."""

import contextlib
import io
import json
import logging
import sys
import time
import traceback

from harmonic_sft_cli import main

time.sleep = lambda seconds: None  # the Hub's client waits between its tries


def run_program(code: str) -> int:
    try:
        exec(code, {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        return 1
    return 0


for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    logging.getLogger().handlers.clear()  # they write to the last command's stderr
    job = json.loads(line)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_program(job) if isinstance(job, str) else main(job)
    result = {"status": status, "out": out.getvalue(), "err": err.getvalue()}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
