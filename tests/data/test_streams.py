import copy
import functools
import itertools
import json
from collections import Counter

import psutil
import pytest
from datasets import IterableDataset
from torch.utils.data import DataLoader

from harmonic_sft.data.bad_rows import BLANK, BadRows
from harmonic_sft.data.files import NUMBER
from harmonic_sft.data.loading import split_streams
from harmonic_sft.data.streams import (
    DataError,
    LogicalStream,
    StreamedRows,
    StreamState,
    advance,
    collate_placed,
    merge,
)

# Python 3.12 and later warn when a process with threads forks, as the workers' loader does.
pytestmark = pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")

SHIFT = 40  # names of documents begin again at a multiple of 2 ** 40 in every stream
CHUNK = 4
MIXTURES = {"turns": None, "weights": [3.0, 1.0]}


def length(source, document):
    """Of a document in tokens; every seventh is blank."""
    return 0 if document % 7 == 5 else 1 + (5 * document + source) % 10


def generate(shards):
    """Documents of one source, which know their length and where they stand."""
    for source, first, last in shards:
        for document in range(first, last):
            yield {"size": length(source, document), "original": document}


def collect(members):
    """An item: the names and epochs of a pack."""
    keys = ("source", "original", "chunk")
    return {"names": [(*(row[key] for key in keys), epoch) for row, epoch in members]}


class Maker:
    """Chunks of 4 tokens, and a count of the documents that were asked for."""

    def __init__(self, source):
        self.source, self.name, self.asked = source, f"data.sources[{source}]", 0

    def __call__(self, documents):
        self.asked += len(documents)
        rows, bad_rows = [], BadRows()
        for document in documents:
            size = document["size"]
            if size == 0:
                bad_rows.report(self.name, "", BLANK)
            for chunk, start in enumerate(range(0, size, CHUNK)):
                name = {"source": self.source, "chunk": chunk}
                tokens = [1] * min(CHUNK, size - start)
                rows.append({**document, **name, "document": document[NUMBER], "input_ids": tokens})
        return rows, bad_rows


def shards(source, size, count):
    edges = [size * index // count for index in range(count + 1)]
    return [(source, first, last) for first, last in itertools.pairwise(edges)]


def logical_streams(sizes=(20, 9), *, count=1, weights=None, window=4, seed=0, capacity=None):
    sources = [
        IterableDataset.from_generator(generate, gen_kwargs={"shards": shards(source, size, count)})
        for source, size in enumerate(sizes)
    ]
    makers = [Maker(source) for source in range(len(sizes))]
    return [
        LogicalStream(
            sources=[documents.shard(count, number) for documents in sources],
            number=number,
            weights=weights,
            make_rows=makers,
            window=window,
            seed=seed,
            capacity=capacity,
        )
        for number in range(count)
    ]


def open_streams(*arguments, eval_documents=0, **settings):
    streams = logical_streams(*arguments, **settings)
    if eval_documents:
        streams, _ = split_streams(streams, eval_documents=eval_documents)
    return StreamedRows(streams, collect)


def plain_order(streamed, num_rows):
    """Rows of all streams in turn, straight from the streams."""
    readers = [stream.rows(None) for stream in streamed.streams]
    found = []
    for reader in itertools.islice(itertools.cycle(readers), num_rows):
        members, place = next(reader)
        found.append((collect(members)["names"], place))
    return found


def read(streamed, num_rows, *, processes=1, workers=0, batch_size=1):
    """The (names, place) of rows in the order of a run, and what each process knows at the end."""
    assert num_rows % (processes * batch_size) == 0
    steps = num_rows // (processes * batch_size)
    batches = []
    for process in range(processes):
        part = copy.copy(streamed)
        part.share(process_index=process, num_processes=processes, batch_size=batch_size)
        collator = functools.partial(collate_placed, collect_items)
        loader = DataLoader(part, batch_size=batch_size, num_workers=workers, collate_fn=collator)
        batches.append(list(itertools.islice(loader, steps)))
    rows = []
    for step in zip(*batches, strict=True):
        for batch in step:
            assert all(set(item) == {"names"} for item in batch["items"])
            names = [item["names"] for item in batch["items"]]
            rows += zip(names, batch["places"], strict=True)
    states = []
    for own in batches:
        state = streamed.state
        for batch in own:
            state = advance(state, batch["places"], batch_size * processes)
        states.append(json.loads(json.dumps(state)))
    return rows, states


def collect_items(items):
    return {"items": items}


def names(rows):
    return [name for members, _ in rows for name in members]


def expected_pass(sizes, epoch, skip=()):
    return Counter(
        (source, document, chunk, epoch)
        for source, size in enumerate(sizes)
        for document in range(size)
        for chunk in range(-(-length(source, document) // CHUNK))
        if (source, document) not in skip
    )


@pytest.mark.parametrize(("count", "capacity"), [(1, None), (3, 9)])
def test_every_pass_has_every_row_of_every_source_once(count, capacity):
    sizes = (20, 9)
    for stream, single in enumerate(logical_streams(sizes, count=count, capacity=capacity)):
        parts = [shards(source, size, count)[stream] for source, size in enumerate(sizes)]
        mine = {(source, index) for source, first, last in parts for index in range(first, last)}
        others = {(s, d) for s, size in enumerate(sizes) for d in range(size)} - mine
        wanted = sum((expected_pass(sizes, epoch, others) for epoch in range(3)), Counter())
        found = []
        rows = single.rows(None)
        while len(found) < wanted.total():
            members, _ = next(rows)
            assert sum(len(row["input_ids"]) for row, _ in members) <= (capacity or CHUNK)
            found += collect(members)["names"]
        assert Counter(found) == wanted
        epochs = [name[-1] for name in found]
        assert epochs == sorted(epochs)


@pytest.mark.parametrize(("count", "mixture"), [(1, "weights"), (3, "turns")])
def test_evaluation_documents_are_in_no_pass(count, mixture):
    sizes = (20, 9)
    streams = logical_streams(sizes, count=count, weights=MIXTURES[mixture])
    streams, held_out = split_streams(streams, eval_documents=5)
    # The table has no column of originals: find the documents by their names.
    starts = [[part[1] for part in shards(source, sizes[source], count)] for source in (0, 1)]
    kept = {
        (
            row["source"],
            starts[row["source"]][row["document"] >> SHIFT] + row["document"] % 2**SHIFT,
        )
        for row in held_out
    }
    assert len(kept) == 5
    rows = names(plain_order(StreamedRows(streams, collect), 300))
    assert {epoch for *_, epoch in rows} >= {0, 1, 2}
    assert not kept & {name[:2] for name in rows}
    # Nothing but these and the blank ones is missing.
    blank = {(s, d) for s in (0, 1) for d in range(sizes[s]) if length(s, d) == 0}
    everything = {(s, d) for s in (0, 1) for d in range(sizes[s])}
    assert {name[:2] for name in rows} == everything - kept - blank


@pytest.mark.parametrize(
    ("count", "processes", "workers", "batch_size"),
    [(1, 1, 2, 3), (3, 3, 0, 2), (3, 2, 2, 2)],
)
def test_no_number_of_processes_or_workers_changes_the_order(count, processes, workers, batch_size):
    streamed = open_streams(count=count, eval_documents=3, capacity=9)
    expected = plain_order(streamed, 36)
    rows, _ = read(streamed, 36, processes=processes, workers=workers, batch_size=batch_size)
    assert rows == expected


PLAN = [(2, 3), (1, 2), (3, 1)]  # processes, batch size


@pytest.mark.parametrize(
    ("count", "mixture", "capacity", "plan", "steps", "workers"),
    [
        (1, "turns", 9, [(1, 1)] * 22, 5, 0),
        (3, "weights", None, [(1, 1)] * 22, 5, 0),
        (3, "turns", 9, [(1, 2)] * 7, 4, 0),
        (3, "weights", None, PLAN, 4, 1),
    ],
)
def test_run_stopped_again_and_again_has_the_rows_of_one_that_is_not(
    count, mixture, capacity, plan, steps, workers
):
    """Also where the number of processes changes at every restart."""
    settings = {"weights": MIXTURES[mixture], "eval_documents": 4, "capacity": capacity}
    expected = plain_order(
        open_streams(count=count, **settings), steps * sum(p * b for p, b in plan)
    )
    assert len(plan) < 22 or max(epoch for *_, epoch in names(expected)) >= 2
    state = StreamState(rows=0, streams={})
    rows = []
    for processes, batch_size in plan:
        # As in a new process: nothing is left of the last one but the state.
        streamed = open_streams(count=count, **settings)
        streamed.state = state
        num_rows = steps * processes * batch_size
        parts = {"processes": processes, "workers": workers}
        found, states = read(streamed, num_rows, batch_size=batch_size, **parts)
        state = merge(states)
        rows += found
    assert rows == expected


@pytest.mark.parametrize("count", [1, 3])
def test_restart_reads_one_window_of_each_stream_again_at_most(count):
    settings = {"sizes": (200,), "count": count, "window": 8}
    stop, more = 150, 30

    def documents_read(streamed):
        return sum(maker.asked for maker in streamed.streams[0].make_rows)

    whole = open_streams(**settings)
    read(whole, stop + more)
    first, second = open_streams(**settings), open_streams(**settings)
    _, [second.state] = read(first, stop)
    read(second, more)
    again = documents_read(first) + documents_read(second) - documents_read(whole)
    assert 0 <= again <= 8 * count


def test_mixture_has_the_shares_of_its_weights():
    """Within 4 standard deviations of a fair draw: 0.037 for 2,200 documents at 3 to 1."""
    streamed = open_streams((4000, 4000), weights=[3.0, 1.0], window=16)
    rows = names(plain_order(streamed, 3000))
    documents = {name[:2] for name in rows}
    # Blank documents and lengths are alike in both sources.
    share = sum(source == 0 for source, _ in documents) / len(documents)
    assert len(documents) > 1500
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / len(documents)) ** 0.5


def test_mixture_begins_an_exhausted_source_again_with_its_next_epoch():
    sizes = (400, 12)
    rows = names(plain_order(open_streams(sizes, weights=[1.0, 1.0]), 300))
    assert {epoch for source, *_, epoch in rows if source == 0} == {0}
    small = [name for name in rows if name[0] == 1]
    last = max(name[-1] for name in small)
    assert last >= 3
    for epoch in range(last - 1):
        found = Counter(name for name in small if name[-1] == epoch)
        wanted = expected_pass(sizes, epoch)
        assert found == Counter({name: n for name, n in wanted.items() if name[0] == 1})


def test_source_without_turns_waits_for_the_longest_to_end():
    rows = names(plain_order(open_streams((60, 6)), 110))
    first = [name for name in rows if name[-1] == 0]
    assert Counter(first) == expected_pass((60, 6), 0)
    assert {source for source, *_ in rows[len(first) - 30 : len(first)]} == {0}


def test_documents_of_a_window_are_shuffled_by_the_seed():
    def windows(seed):
        order = names(plain_order(open_streams((40,), window=20, seed=seed), 52))
        assert Counter(order) == expected_pass((40,), 0)
        first = sum(1 for document in range(20) for _ in range(0, length(0, document), CHUNK))
        assert all(document < 20 for _, document, *_ in order[:first])
        assert order[:first] != sorted(order[:first])
        assert order[first:] != sorted(order[first:])
        return order

    assert expected_pass((40,), 0).total() == 52
    assert windows(0) == windows(0) != windows(1)


def test_blank_documents_passed_over_while_looking_ahead_are_counted_once():
    streams = logical_streams((20,))
    assert streams[0].hold_out(5)[1:] == (5, True)
    assert streams[0].bad_rows.total == 0  # document 5 is looked at to see whether any is left
    _, place = next(streams[0].rows(None))
    assert place.snapshot["skipped"] == 1
    assert streams[0].hold_out(12)[1:] == (12, False)  # it and two more, up to the end
    assert streams[0].bad_rows.total == 3


class Blank(Maker):
    """Finds nothing in the documents of a range."""

    def __init__(self, source, first, last):
        super().__init__(source)
        self.blank = range(first, last)

    def __call__(self, documents):
        return super().__call__([row for row in documents if row["original"] not in self.blank])


@pytest.mark.parametrize("mixture", MIXTURES)
def test_stream_without_a_single_row_is_refused(mixture):
    [stream] = logical_streams((20, 6), weights=MIXTURES[mixture])
    stream.make_rows = [Blank(source, 0, 20) for source in (0, 1)]
    with pytest.raises(ValueError, match=r"^data\.sources\[0\], .*only blank or bad ones"):
        next(stream.rows(None))
    [stream] = logical_streams((20, 6), weights=MIXTURES[mixture])
    stream.hold_out(2)
    stream.make_rows = [Blank(source, 0, 20) for source in (0, 1)]
    with pytest.raises(ValueError, match=r"data\.sources: expected more documents than the eval"):
        next(stream.rows(None))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_long_blank_part_beside_an_exhausted_source_is_passed_over(mixture):
    [stream] = logical_streams((80, 3), weights=MIXTURES[mixture])
    stream.make_rows = [Blank(0, 8, 70), Blank(1, 0, 3)]
    rows = [collect(members)["names"][0] for members, _ in itertools.islice(stream.rows(None), 60)]
    assert {document for source, document, *_ in rows if source == 0} >= {0, 7, 71, 79}
    assert {source for source, *_ in rows} == {0}


def test_streams_without_a_row_left_take_no_part():
    streams = logical_streams((20,), count=2)
    streams[0].sources = [
        IterableDataset.from_generator(generate, gen_kwargs={"shards": [(0, 0, 1)]})
    ]
    streams, _ = split_streams(streams, eval_documents=4)
    assert [stream.number for stream in streams] == [1]
    streamed = StreamedRows(streams, collect)
    expected = plain_order(streamed, 50)
    for stop in (3, 30):
        streamed.state = StreamState(rows=0, streams={})
        rows, [streamed.state] = read(streamed, stop)
        maker = streams[0].make_rows[0]
        maker.asked = 0
        assert rows + read(streamed, 20)[0] == expected[: stop + 20]
        assert maker.asked < 28  # not from the beginning again


def test_memory_stays_flat_over_a_long_stream():
    """The 60,000 rows of 40,000 documents, if kept, take some 20 MB."""
    [stream] = logical_streams((40_000,), window=256)
    process = psutil.Process()
    sizes, seen = [], 0
    for [(row, epoch)], _ in stream.rows(None):
        if epoch:
            break
        if row["original"] // 2000 > seen // 2000:
            sizes.append(process.memory_info().rss)
        seen = max(seen, row["original"])
    assert seen > 39_990
    assert len(sizes) == 19
    assert max(sizes) - sizes[0] < 8e6


class Broken(IOError):
    """A failure of a library, which knows no row."""


def fail_at(shards):
    for document in range(shards[0]):
        yield {"size": 1, "original": document}
    raise Broken("the connection\nended")


@pytest.mark.parametrize("workers", [0, 2])
def test_failure_of_a_library_is_one_line_with_source_and_place(workers):
    [stream] = logical_streams((0, 4))
    stream.sources[0] = IterableDataset.from_generator(fail_at, gen_kwargs={"shards": [6]})
    stream.number = 3
    streamed = StreamedRows([stream], collect)
    message = (
        "data.sources[0]: expected readable rows, got Broken (the connection ended) "
        "in document 6 of logical stream 3, counted from 0"
    )
    with pytest.raises(DataError) as caught:
        read(streamed, 30, workers=workers)
    assert str(caught.value) == message


@pytest.mark.parametrize("size", [1, 5])
def test_the_share_of_a_small_source_is_that_of_its_weight(size):
    """A draw that meets the end of a source is still that source's."""
    rows = names(plain_order(open_streams((4000, size), weights=[1.0, 1.0]), 2000))
    starts = Counter(source for source, _, chunk, _ in rows if chunk == 0)
    share = starts[1] / starts.total()
    blank = sum(length(0, k) == 0 for k in range(4000)) / 4000  # of the large source
    assert abs(share - 1 / (2 - blank)) < 0.04


def test_a_source_that_the_evaluation_takes_whole_is_named(caplog):
    sources = [
        IterableDataset.from_generator(generate, gen_kwargs={"shards": [(s, 0, n)]})
        for s, n in enumerate((3, 50))
    ]
    stream = LogicalStream(
        sources=sources,
        number=0,
        weights=None,
        make_rows=[Maker(0), Maker(1)],
        window=8,
        seed=0,
        capacity=None,
    )
    stream.hold_out(20)
    assert "data.sources[0] has no document left to train on in stream 0" in caplog.text
    assert "data.sources[1]" not in caplog.text
