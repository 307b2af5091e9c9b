import pickle

import pytest

from harmonic_sft.data.bad_rows import BLANK, BadRows


def test_counter_survives_pickling_and_counts_a_place_once():
    bad_rows = BadRows()
    for number in [*range(8), *range(8)]:
        bad_rows.report("s", f"line {number}", "broken")
    bad_rows.report("s", "row group 1", "broken", rows=100)
    for _ in range(7):
        bad_rows.report("s", "any", BLANK)
    bad_rows.merge(BadRows({"line 1": ("broken", 1), "line 99": ("broken", 1)}, blank=3))
    copy = pickle.loads(pickle.dumps(bad_rows))
    assert copy == bad_rows
    assert copy.total == 8 + 100 + 1 + 10
    assert copy.first == [f"line {number}: broken" for number in range(5)]


def test_bad_row_is_an_error_where_none_may_be_skipped():
    bad_rows = BadRows(skip=False)
    bad_rows.report("data.sources[1]", "line 3", BLANK)
    assert bad_rows.total == 1
    message = r"^data\.sources\[1\]: no text in document 4\. Repair it, or set data\.on_bad_row"
    with pytest.raises(ValueError, match=message):
        bad_rows.report("data.sources[1]", "data.sources[1], document 4", "no text")
