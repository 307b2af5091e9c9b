from scripts.size import sizes_of_package, sizes_of_tests, table


def write(path, num_lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * num_lines)


def test_every_line_is_counted_once_in_its_unit(tmp_path):
    write(tmp_path / "harmonic_sft" / "ops" / "deep" / "a.py", 3)
    write(tmp_path / "harmonic_sft" / "ops" / "a.json", 99)  # no code
    write(tmp_path / "harmonic_sft" / "new_unit" / "b.py", 5)
    write(tmp_path / "harmonic_sft" / "__init__.py", 7)
    write(tmp_path / "harmonic_sft_cli.py", 11)
    sizes = sizes_of_package(tmp_path)
    assert (sizes["ops"], sizes["rest"], sum(sizes.values())) == (3, 23, 26)
    write(tmp_path / "tests" / "conftest.py", 2)
    write(tmp_path / "tests" / "ops" / "test_a.py", 4)
    write(tmp_path / "tests" / "experiments" / "test_b.py", 6)
    assert sizes_of_tests(tmp_path) == {"experiments": 6, "ops": 4, "rest": 2}
    lines = [line.split() for line in table(tmp_path).splitlines()]
    assert ["ops", "3", "2,000"] in lines
    assert ["total", "26", "14,500"] in lines
    assert ["total", "6", "14,000"] in lines  # tests without those of the experiments
    assert ["tests/experiments", "6", "-"] in lines
