"""Runs transformers' own model tests over our models and over the files of this folder.

The tests are those of transformers' source distribution, which this fetches. Tests of generation
and export and the converter of modular files are in its repository alone: name a checkout for them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from install import FOLDER, MODELS, install

ROOT = FOLDER.parents[1]
REQUIREMENT = FOLDER / "requirements.txt"  # the pinned version and its sha256
VERSION = REQUIREMENT.read_text().split()[0].split("==")[1]
# What the tests import and the source distribution lacks; what stands for it without a checkout.
MISSING = {
    "tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "tests/utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    "tests/utils/tiny_model_summary.json": "{}\n",
}
OF_CHECKOUT = ("tests/generation", "tests/exporters", "tests/utils", "utils")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "-W", "ignore"]


def run(command: list[str], folder: Path, *paths: Path) -> int:
    """Run a command in a folder that imports from the paths first; return its exit status."""
    path = os.pathsep.join(map(str, paths))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    print("$", *command, flush=True)
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def make_tree(work: Path, checkout: Path | None) -> Path:
    """Return a new folder with transformers' source and tests, completed from a checkout."""
    archive = work / f"transformers-{VERSION}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "-d", str(work), "-r", str(REQUIREMENT)], check=True)
    tree = work / f"transformers-{VERSION}"
    shutil.rmtree(tree, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(work, filter="data")
    if checkout is not None:
        for part in OF_CHECKOUT:
            shutil.copytree(checkout / part, tree / part, dirs_exist_ok=True)
        shutil.copy(checkout / "pyproject.toml", tree)  # how generated files are formatted
    for name, text in MISSING.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text)
    shutil.copytree(FOLDER / "mixins", tree / "tests/models/harmonic")
    for folder in ("", "generation", "exporters", "utils", "models", "models/harmonic"):
        (tree / "tests" / folder / "__init__.py").touch()
    return tree


def is_generated(tree: Path) -> bool:
    """Whether the converter makes the stored files of the modular one."""
    names = ("configuration_neobert.py", "modeling_neobert.py")
    converter = ["utils/modular_model_converter.py", "neobert", "--num_workers", "1"]
    status = run([sys.executable, *converter], tree, tree / "src")
    folder = tree / MODELS / "neobert"
    return status == 0 and all(
        (folder / name).read_text() == (FOLDER / MODELS / "neobert" / name).read_text()
        for name in names
    )


def main(work: Path, checkout: Path | None, options: list[str]) -> int:
    """Run everything; return 1 if something failed."""
    work.mkdir(parents=True, exist_ok=True)
    tree = make_tree(work, checkout)
    pytest = [*PYTEST, "-c", os.devnull, "--rootdir", str(tree), *options]
    failed = [run([*pytest, "tests/models/harmonic"], tree, tree / "src", ROOT) != 0]
    install(tree)
    failed.append(run([*pytest, "tests/models/neobert"], tree, tree / "src") != 0)
    beside = [sys.executable, "-c", "import harmonic_sft"]  # where transformers has a NeoBERT
    failed.append(run(beside, tree, tree / "src", ROOT) != 0)
    if checkout is None:
        print(
            "Left out without TRANSFORMERS_SOURCE=/path/to/checkout: tests of generation and "
            "export, and whether the generated files are those of the modular one."
        )
    else:
        same = is_generated(tree)
        print("Generated files:", "equal" if same else "differ from the stored ones")
        failed.append(not same)
    return int(any(failed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="a folder for transformers' source")
    parser.add_argument("--checkout", type=Path, help="a checkout of transformers at this version")
    known, rest = parser.parse_known_args()
    sys.exit(main(known.work.resolve(), known.checkout, rest))
