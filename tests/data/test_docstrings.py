from pathlib import Path

from harmonic_sft.data.docstrings import standard_library_docstrings

LONG = "A sentence that is long enough to be kept by the default settings."


def write(folder: Path, name: str, text: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_module_class_and_function_docstrings_are_found_once_each(tmp_path):
    write(tmp_path, "b.py", f'"""{LONG}"""\nasync def f():\n    """{LONG} Async."""\n')
    write(
        tmp_path, "a.py", f'class C:\n    """{LONG} Class."""\n    def m(self):\n        "{LONG}"\n'
    )
    write(tmp_path, "c.py", '"""Too short."""\n')
    found = standard_library_docstrings(tmp_path)
    assert found == [f"{LONG} Class.\n\n{LONG}", f"{LONG} Async."]


def test_tests_and_installed_packages_are_left_out(tmp_path):
    for folder in ("test", "site-packages/package", "json/tests", "idlelib"):
        write(tmp_path, f"{folder}/a.py", f'"""{LONG}"""')
    assert standard_library_docstrings(tmp_path) == []


def test_broken_files_are_skipped_and_warnings_silenced(tmp_path):
    write(tmp_path, "syntax.py", f'"""{LONG}"""\ndef')
    write(tmp_path, "null.py", b'"""a"""\0')
    write(tmp_path, "encoding.py", "# coding: no-such-codec\n")
    write(tmp_path, "escape.py", f'"""{LONG} \\d"""\n1 is 1\n')
    assert standard_library_docstrings(tmp_path) == [f"{LONG} \\d"]
