from scripts.size import sizes


def test_every_line_is_counted_once_in_its_unit(tmp_path):
    def write(path, num_lines):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 1\n" * num_lines)

    write("harmonic_sft/ops/deep/a.py", 3)
    write("harmonic_sft/ops/a.json", 99)  # no code
    write("harmonic_sft/new_unit/b.py", 5)
    write("harmonic_sft/__init__.py", 7)
    write("harmonic_sft_cli.py", 11)
    write("tests/conftest.py", 2)
    write("tests/ops/test_a.py", 4)
    write("tests/experiments/test_b.py", 6)
    write("experiments/c.cpp", 8)
    found = sizes(tmp_path)
    assert (found["ops"], found["rest"], found["package"]) == (3, 23, 26)
    assert (found["tests/ops"], found["tests/*.py"], found["tests"]) == (4, 2, 6)
    assert (found["tests/experiments"], found["experiments"]) == (6, 8)
