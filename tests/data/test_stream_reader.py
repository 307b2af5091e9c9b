import itertools
import json

import pytest
from datasets import IterableDataset

from harmonic_sft.data.files import BadRowPolicy, BadRows, file_shards, read_shards
from harmonic_sft.data.stream_reader import StreamReader, document_name, left_out

NAME = "data.sources[2]"


class Broken(OSError):
    """A failure of a library, which knows no row."""


def generate(shards):
    for document in range(shards[0]):
        yield {"text": f"{document}"}
    raise Broken("the connection\nended")


@pytest.mark.parametrize(("stream", "of"), [(0, ""), (3, " of logical stream 3")])
def test_failure_of_a_library_is_named_by_source_and_place(stream, of):
    documents = IterableDataset.from_generator(generate, gen_kwargs={"shards": [6]})
    reader = StreamReader(documents, NAME, stream, BadRows(), None)
    for number in range(6):
        document, _ = reader.next()
        assert document == {"text": f"{number}", "document": (stream << 40) + number}
    with pytest.raises(ValueError, match="expected readable rows") as caught:
        reader.next()
    assert str(caught.value) == (
        f"{NAME}: expected readable rows, got Broken (the connection ended) in document 6{of}, "
        "counted from 0"
    )
    assert isinstance(caught.value.__cause__, Broken)


@pytest.fixture
def lines(tmp_path):
    """Seven documents, before every second of which a line is broken."""
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": f"{number}"}) for number in range(7)]
    path.write_text("\n".join(f"{{cut\n{line}" if i % 2 else line for i, line in enumerate(good)))
    return str(path)


def open_lines(path, bad_rows):
    policy = BadRowPolicy(NAME, bad_rows)
    shards = file_shards(path, name=NAME)
    settings = {"shards": shards, "policy": policy}
    return IterableDataset.from_generator(read_shards, gen_kwargs=settings)


def read(reader):
    """Texts and the lines left out, up to the end of the pass."""
    texts, places = [], []
    while True:
        document, unread = reader.next()
        places += unread.places
        if document is None:
            return texts, places
        texts.append(document["text"])


@pytest.mark.parametrize("stop", range(8))
def test_lines_left_out_are_told_once_also_by_a_reader_that_goes_on(lines, stop):
    expected = [f"{lines!r}, line {line}" for line in (2, 5, 8)]
    bad_rows = BadRows()
    first = StreamReader(open_lines(lines, bad_rows), NAME, 0, bad_rows, None)
    told = list(itertools.chain(*(first.next()[1].places for _ in range(stop))))
    state = json.loads(json.dumps(first.state()))
    second = StreamReader(open_lines(lines, bad_rows), NAME, 0, bad_rows, None)
    second.load(state)
    texts, places = read(second)
    assert texts == [f"{number}" for number in range(stop, 7)]
    assert told + places == expected
    assert bad_rows == BadRows()
    second.restart()
    assert read(second) == ([f"{number}" for number in range(7)], expected)


def test_error_that_names_its_source_stays_as_it_is(lines):
    reader = StreamReader(open_lines(lines, None), NAME, 0, BadRows(), None)
    reader.next()
    with pytest.raises(ValueError, match=r"^data\.sources\[2\]: .*a\.jsonl', line 2\. Repair"):
        reader.next()


def test_document_of_the_first_stream_or_of_a_table_has_its_number_alone():
    assert document_name(7) == "document 7"
    assert document_name((2 << 40) + 7) == "document 7 of logical stream 2"


def test_counter_forgets_what_a_failing_call_left_out():
    bad_rows = BadRows({"a": ("cut", 1)}, blank=2)

    def fail():
        bad_rows.add("b", "cut")
        raise Broken

    with pytest.raises(Broken):
        left_out(bad_rows, fail)
    assert bad_rows == BadRows({"a": ("cut", 1)}, blank=2)
