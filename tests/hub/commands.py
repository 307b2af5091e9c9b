"""Run in a process of its own: commands of harmonic-sft, one JSON list of arguments a line."""

import contextlib
import io
import json
import logging
import sys
import time

from harmonic_sft_cli import main

time.sleep = lambda seconds: None  # the Hub's client waits between its tries

for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    logging.getLogger().handlers.clear()  # they write to the last command's stderr
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(json.loads(line))
    result = {"status": status, "out": out.getvalue(), "err": err.getvalue()}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
