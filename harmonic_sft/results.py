"""The JSON files of a run: how they are written, what machine they come from, how they print."""

import hashlib
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from huggingface_hub import get_token
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

logger = logging.getLogger(__name__)
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "peft", "harmonic-sft")
SEARCHED = (1 / 16, 16.0)  # factors on the logits between which evaluations look for the best
LEAST_WIDTH = 16  # of a column of text in a narrow terminal, which folds longer words
ADDRESS = re.compile(r"\b(\w+://)(?:[^\s/?#]*@)?([^\s?#]*)(?:[?#]\S*)?")
TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
MIN_TOKEN_LENGTH = 16  # shorter ones are no tokens, and may occur as words in any text
ONE_NUMBER = r"[-+]?\d[\d.,]*(e[-+]?\d+)?"
# Also a bound, an interval, or a number with its unit.
NUMBER = re.compile(rf"([<>]= )?{ONE_NUMBER}( (to|±) {ONE_NUMBER}| ?[^\W\d_]\S*| ?%)?")


def environment() -> dict[str, Any]:
    """Describe what the numbers of this process depend on.

    Returns:
        `versions` by package (None: not installed), `git_commit` of the checkout that this package
        runs from (None: not a checkout), `dirty` (tracked files differ from the commit),
        `hardware` (`cpu`, `cores`, `memory_bytes`, `gpus`) and `date` (UTC, ISO 8601).
    """
    return {
        "versions": {
            "python": platform.python_version(),
            **{package.replace("-", "_"): package_version(package) for package in PACKAGES},
            "torch": torch.__version__,  # its package does not name the build
        },
        **_git_state(Path(__file__)),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": [
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ]
            or ["mps"] * torch.backends.mps.is_available(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _token() -> str:
    """Return the Hub's token, empty if none can be read: another user's file, a service's error."""
    try:
        return get_token() or ""
    except Exception:  # whoever needs the token will report it
        return ""


def without_secrets(value: Any) -> Any:
    """Return a JSON value whose web addresses have lost user, password, query and fragment.

    Whoever reads a signed address can open its file. Tokens of the Hub are removed too, since the
    Hub may repeat one that it refuses.
    """
    if isinstance(value, str):
        words, token = TOKEN.sub("hf_...", ADDRESS.sub(r"\1\2", value)), _token()
        return words.replace(token, "hf_...") if len(token) >= MIN_TOKEN_LENGTH else words
    if isinstance(value, dict):
        return {key: without_secrets(entry) for key, entry in value.items()}
    return [without_secrets(entry) for entry in value] if isinstance(value, list) else value


def leaves(node: Any, key: str = "") -> dict[str, Any]:
    """Flatten nested mappings to `a.b.c: value`."""
    if not isinstance(node, Mapping):
        return {key: node}
    flat = {}
    for name, value in node.items():
        flat |= leaves(value, f"{key}.{name}" if key else str(name))
    return flat


def write_results(folder: str | Path, name: str, payload: dict[str, Any]) -> Path:
    """Write `without_secrets` of a payload to `name.json` in a folder, and return its path.

    The folder is made if it does not exist. The file is written whole or not at all.

    Raises:
        ValueError: A value that JSON cannot hold, such as a tensor, infinity or NaN.
    """
    payload = without_secrets(payload)
    try:
        text = json.dumps(payload, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected JSON values, got others: {error}") from error
    path = Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{text}\n")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a text file, whole or not at all, even if the machine loses power."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def make_folder(folder: Path, message: str) -> None:
    """Make a folder and check that it takes files, before the work that will fill it.

    Raises:
        ValueError: It cannot be made or written: `message`, followed by the system's reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{message}: {error.strerror}") from error


def file_sha256(path: Path) -> str:
    """Return the checksum of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_whole(path: Path, *keys: str) -> dict[str, Any] | None:
    """Read a file that `write_results` wrote; None if it does not exist or is damaged.

    Damage, such as a missing key, is logged.
    """
    if not path.is_file():
        return None
    try:
        return read_results(path, *keys)
    except ValueError as error:
        logger.warning("Damaged, and left out: %s", error)
        return None


def read_results(path: str | Path, *keys: str) -> dict[str, Any]:
    """Read a file that `write_results` wrote.

    Raises:
        ValueError: No such file, or not a JSON object with these keys.
    """
    if not Path(path).is_file():
        raise ValueError(f"results: expected an existing JSON file, got {str(path)!r}")
    try:
        payload = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got an error: {error}") from error
    if not isinstance(payload, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(payload).__name__}")
    if missing := [key for key in keys if key not in payload]:
        raise ValueError(f"{path}: expected {', '.join(keys)}, got no {missing[0]}")
    return payload


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Turn any error inside the `with` block into one that names the file or folder.

    Raises:
        ValueError: An error occurred.
    """
    try:
        yield
    except Exception as error:  # tokenizers raises Exception itself
        if isinstance(error, ValueError) and ": expected " in str(error):
            raise  # one of ours
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: expected it as it was saved, got an error: {reason}") from error


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to standard output, numbers to the right and nothing cut off.

    Column heads wrap between words. In a terminal long cells wrap too, and words of text over
    `LEAST_WIDTH` letters are folded. Floats have three decimals or digits, and None is `-`.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000  # in a file every row is one line
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    least = 1  # of the whole table: one character before, three beside every column
    for index, column in enumerate(columns):
        texts = [row[index] for row in cells if row[index] != "-"]
        width = max(map(cell_len, [*column.split(), *texts]), default=0)
        if all(NUMBER.fullmatch(text) for text in texts):
            table.add_column(column, justify="right", overflow="fold", width=width)
            least += 3 + width
        else:
            words = max(map(cell_len, " ".join([column, *texts]).split()), default=0)
            low = min(words, LEAST_WIDTH)
            table.add_column(column, overflow="fold", min_width=low, max_width=width)
            least += 3 + low
    console.width = max(console.width, least)
    for row in cells:
        table.add_row(*row)
    console.print(table, crop=False)


def show_best(metrics: dict[str, float]) -> str:
    """Return the best exponent or inverse temperature; as a bound if the search ended there."""
    best = metrics.get("post_hoc_h_exp", metrics.get("post_hoc_inverse_temperature", math.nan))
    h_exp = metrics.get("h_exp") if "post_hoc_h_exp" in metrics else None
    scale = best / h_exp if h_exp else best
    low, high = SEARCHED
    if not scale <= 1.001 * low and not scale >= 0.999 * high:
        return f"{best:.3g}"
    return f"{'<=' if (scale < 1) == (best > 0) else '>='} {best:.3g}"


def peak_memory_bytes() -> int:
    """Return the most memory this process has held: on the GPU if it used one, else resident."""
    if peak := torch.cuda.max_memory_allocated():
        return peak
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.is_file() else None
    if found:  # on Linux ru_maxrss is at least that of the parent process
        return int(found[1]) * 1024
    import resource  # Unix only, like the number itself

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def package_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state(file: Path) -> dict[str, Any]:
    """Return the commit if the file is tracked; a `.venv` may lie in some other repository."""
    unknown = {"git_commit": None, "dirty": None}
    if _output("git", "-C", str(file.parent), "ls-files", "--error-unmatch", file.name) is None:
        return unknown
    words = ("describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
    commit = _output("git", "-C", str(file.parent), *words)
    if commit is None:
        return unknown
    return {"git_commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}


def _cpu_model() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else []
    return names[0] if names else platform.machine()


def _output(*command: str) -> str | None:
    """Return what a command prints, or None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.1 else f"{value:.3g}"
