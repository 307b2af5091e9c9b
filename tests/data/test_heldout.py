import json
import tracemalloc

import numpy as np
import pytest

from harmonic_sft.data.heldout import (
    Ancestor,
    HeldOut,
    fingerprint,
    lineage,
    ngram_hashes,
    record,
    run_home,
    seen_by,
    short_hashes,
    word_hashes,
)

LETTERS = list("abcdefghijklmnopqrstuvwxyz")
HERE, THERE = {"path": "a.txt"}, {"path": "b.txt"}


def of_texts(texts):
    return HeldOut.of((fingerprint(text), word_hashes(text)) for text in texts)


def kind(text, *held_out):
    return of_texts(held_out).kind_of(fingerprint(text), word_hashes(text))


def test_fingerprint_is_the_start_of_the_sha256_of_the_text():
    assert fingerprint("abc") == "ba7816bf8f01cfea414140de5dae2223"  # FIPS 180-2, appendix B.1


def test_white_space_alone_makes_no_other_document():
    assert fingerprint(" one\n two\t three ") == fingerprint("one two three")
    assert fingerprint("one two three") != fingerprint("one two, three")
    assert fingerprint("One") != fingerprint("one")


def test_the_form_of_unicode_makes_no_other_document():
    composed, text = "\u00e9t\u00e9", "e\u0301te\u0301"
    assert fingerprint(text) == fingerprint(composed)
    assert word_hashes(text).tolist() == word_hashes(composed).tolist()


def test_words_have_no_case_and_no_punctuation_and_may_be_characters():
    assert word_hashes("Don't, STOP!").tolist() == word_hashes("don t stop").tolist()
    assert len(word_hashes("don t stop")) == 3
    assert len(word_hashes("日本語 text")) == 4  # no spaces are written there
    assert len(word_hashes("กิน")) == 3
    assert (
        word_hashes("今天\uff0c天气\u3000很好\u3002").tolist()
        == word_hashes("今天天气很好").tolist()
    )


def test_vowel_signs_and_accents_are_parts_of_words():
    assert len(word_hashes("मैं हिन्दी बोलता हूँ")) == 4
    assert word_hashes("काम").tolist() != word_hashes("कम").tolist()
    assert len(word_hashes("שָׁלוֹם")) == 1


def test_thirteen_words_in_a_row_are_counted_once_each():
    words = word_hashes(" ".join(LETTERS[:15]))
    assert len(ngram_hashes(words)) == 3  # a..m, b..n, c..o
    assert len(ngram_hashes(words[:12])) == 0
    assert len(ngram_hashes(np.tile(words[:1], 40))) == 1
    parts = [*(words[i : i + 13] for i in range(3)), words[12::-1]]  # the order counts
    assert len({int(ngram_hashes(part)[0]) for part in parts}) == 4


@pytest.mark.parametrize(("shared", "expected"), [(13, None), (14, None), (15, "near")])
def test_near_is_more_than_half_of_the_documents_own_13_grams(shared, expected):
    """A document of 16 words has four 13-grams; the first `shared` words hold 1, 2 or 3 of them."""
    text = " ".join([*LETTERS[:shared], *(f"new{i}" for i in range(16 - shared))])
    assert kind(text, " ".join(LETTERS)) == expected


@pytest.mark.parametrize(
    ("text", "held_out", "expected"),
    [
        ("one  two", ["one two"], "exact"),  # however short
        ("one two three", ["one two"], None),
        # Four 13-grams, two of each of the held-out documents; then three of one.
        (" ".join(LETTERS[:16]), [" ".join(LETTERS[:14]), " ".join(LETTERS[2:16])], None),
        (" ".join(LETTERS[:16]), [" ".join(LETTERS[:15]), "x"], "near"),
        # A long held-out document makes a short one in it a near duplicate, not the other way.
        (" ".join(LETTERS[5:18]), [" ".join(LETTERS)], "near"),
        (" ".join(LETTERS), [" ".join(LETTERS[5:18])], None),
    ],
)
def test_a_duplicate_is_one_of_a_single_document(text, held_out, expected):
    assert kind(text, *held_out) == expected


def test_digest_does_not_depend_on_the_order():
    one, other = of_texts(["a", "b"]), of_texts(["b", "a"])
    assert one.digest == other.digest != of_texts(["a"]).digest


def run(folder, held_out, trained=None, *, source=HERE, base=None):
    """Record a run that holds out some texts and trains on others."""
    names = None if trained is None else short_hashes([fingerprint(text) for text in trained])
    record(folder, of_texts(held_out), sources=[source], eval_source=None, base=base, trained=names)
    return str(folder)


def judged(model, texts, source=HERE):
    found = lineage(model, [fingerprint(text) for text in texts], [source])
    return [(ancestor.verdict, ancestor.documents_seen) for ancestor in found]


def test_a_run_may_be_named_like_a_checkpoint(tmp_path):
    named = tmp_path / "checkpoint-mine"
    inside = named / "checkpoint-6"
    inside.mkdir(parents=True)
    assert run_home(named) == tmp_path
    (named / "run.yaml").touch()
    assert run_home(named) == run_home(inside) == named


def test_a_stream_does_not_keep_what_a_table_left_in_its_folder(tmp_path):
    run(tmp_path, ["a"], ["c"])
    model = run(tmp_path, ["a"], None)
    assert judged(model, ["c"]) == [("seen", 1)]  # of its own source
    assert judged(model, ["d"]) == [("seen", 1)]


def test_run_on_a_table_has_seen_what_it_recorded_and_nothing_else(tmp_path):
    model = run(tmp_path, ["a", "b"], ["c", "d"])
    assert judged(model, ["a", "b"]) == [("unseen", 0)]
    assert judged(model, ["a", "c", "d"]) == [("seen", 2)]
    assert judged(model, ["z"], THERE) == judged(model, ["z"]) == [("unseen", 0)]


def test_run_on_a_stream_may_have_seen_what_its_sources_hold_and_its_list_does_not(tmp_path):
    model = run(tmp_path, ["a", "b"])
    assert judged(model, ["b"]) == [("unseen", 0)]
    assert judged(model, ["b", "c"]) == [("seen", 1)]
    assert judged(model, ["c"], THERE) == [("unknown", 0)]


def test_a_file_signed_again_is_the_same_source(tmp_path):
    path = "https://files.org/a.jsonl?X-Signature="
    model = run(tmp_path, ["a", "b"], source={**HERE, "path": f"{path}old"})
    assert judged(model, ["c"], {**HERE, "path": f"{path}new"}) == [("seen", 1)]
    assert "old" not in (tmp_path / "results" / "held_out.json").read_text()


def test_models_of_others_and_of_earlier_versions_are_unknown(tmp_path):
    (tmp_path / "old" / "results").mkdir(parents=True)
    for model in ("owner/name", "package:name", str(tmp_path / "old")):
        assert lineage(model, ["0" * 32], []) == [Ancestor(model, "unknown")]
    assert lineage(None, ["0" * 32], []) == []


def test_every_model_on_the_way_is_judged(tmp_path):
    first = run(tmp_path / "1", ["a"], ["b"], base="owner/name")
    second = run(tmp_path / "2", ["a", "b"], ["c"], base=first)
    assert judged(second, ["a"]) == [("unseen", 0), ("unseen", 0), ("unknown", 0)]
    assert judged(second, ["b"]) == [("unseen", 0), ("seen", 1), ("unknown", 0)]
    fresh = run(tmp_path / "3", ["a"], ["b"])
    assert judged(fresh, ["a"]) == [("unseen", 0)]


def test_a_checkpoint_is_judged_as_its_run(tmp_path):
    model = run(tmp_path, ["a"], ["b"])
    assert judged(f"{model}/checkpoint-2", ["b"]) == [("seen", 1)]
    child = run(tmp_path / "2", ["a"], ["b"], base=f"{model}/checkpoint-2")
    assert judged(child, ["a"]) == [("unseen", 0), ("unseen", 0)]


def test_base_that_was_replaced_since_is_unknown(tmp_path):
    base = run(tmp_path / "1", ["a"], ["b"])
    model = run(tmp_path / "2", ["a"], ["b"], base=base)
    run(tmp_path / "1", ["b"], ["a"])
    assert judged(model, ["a"]) == [("unseen", 0), ("unknown", 0)]


def test_who_has_seen_documents_is_said_in_a_sentence():
    seen = [Ancestor("runs/a", "unseen"), Ancestor("runs/b", "seen", 15)]
    expected = "runs/b was trained without holding out 15 of the 16 documents"
    assert seen_by(seen, 16) == expected
    assert seen_by([Ancestor("runs/a", "unknown")], 16) is None


def test_a_word_stands_in_no_file(tmp_path):
    run(tmp_path, [" ".join(f"secret{i}" for i in range(20))], ["secret"])
    texts = [path.read_bytes() for path in (tmp_path / "results").iterdir()]
    assert len(texts) == 2
    assert not any(b"secret" in text for text in texts)
    assert json.loads((tmp_path / "results" / "held_out.json").read_text())["base"] is None


def test_training_documents_take_few_bytes_each_while_they_are_compared():
    """Two million took 690 MB."""
    words = word_hashes("one two")
    documents = [(fingerprint(str(number)), words) for number in range(2000)]
    held_out = of_texts(["7"])
    tracemalloc.start()
    stay, duplicates, hashes = held_out.drop_copies(documents)
    assert tracemalloc.get_traced_memory()[1] < 100 * len(documents)
    tracemalloc.stop()
    assert (stay.sum(), duplicates.exact) == (1999, 1)
    others = [name for name, _ in documents if name not in held_out.fingerprints]
    np.testing.assert_array_equal(hashes, short_hashes(others))
