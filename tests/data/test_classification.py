"""Labeled rows: columns, classes, splits, cut texts, and the labels of words."""

import datasets
import pytest

from tests.data import conftest
from tests.data.conftest import bert_like

CLASSIFIER = {"context_length": 6, "label_column": "label", "eval": {"documents": 2}}


@pytest.fixture(scope="session")
def tokenizer():
    return bert_like(["red", "blue", "gray", "##ish"])


def load(path, tokenizer, *, task="sequence_classification", **settings):
    return conftest.load(tokenizer, {"path": path}, task=task, **CLASSIFIER | settings)


TEXTS = [f"{one} {other}" for one in ("red", "blue", "gray") for other in ("blue", "gray", "red")]
LABELS = ["b", "a", "b", "c", "a", "b", "c", "a"]
ROWS = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=False)]


def test_classes_are_sorted_and_rows_are_split_once(write, tokenizer):
    data = load(write(ROWS), tokenizer)
    assert data.labels == ["a", "b", "c"]
    assert (len(data.train), len(data.eval)) == (6, 2)
    assert data.num_documents == 6
    assert data.num_tokens == 6 * 4
    everything = [int(row["labels"]) for rows in (data.train, data.eval) for row in rows]
    assert sorted(everything) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert data.unigram_counts.sum() == 6
    assert data.train[0]["input_ids"].tolist() == [2, 5, 6, 3]
    again = load(write(ROWS), tokenizer)
    assert [int(row["labels"]) for row in again.eval] == [int(row["labels"]) for row in data.eval]


def test_integers_are_sorted_as_numbers_and_named(write, tokenizer, tmp_path):
    labels = [10, 2, 2, 10, 2, 10, -1, -1]
    rows = [{"text": text, "label": n} for text, n in zip(TEXTS, labels, strict=False)]
    table = tmp_path / "rows.csv"  # whose values are strings
    datasets.Dataset.from_list(rows).to_csv(table)
    for path in (write(rows), str(table)):
        assert load(path, tokenizer, eval={"documents": 1}).labels == ["-1", "2", "10"]


def named(texts, labels, names):
    """A data set that has names for its numbers."""
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    rows = {"text": texts, "label": labels}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def test_numbers_of_a_saved_data_set_get_its_names(tmp_path, tokenizer):
    """Splits without labels, such as the test split of SST-2, have -1 there."""
    saved = named(TEXTS[:6], [0, 1, 0, 1, 0, -1], ["no", "yes"])
    saved.save_to_disk(tmp_path / "saved")
    saved.select(range(5)).to_parquet(tmp_path / "a.parquet")
    assert load(str(tmp_path / "a.parquet"), tokenizer).labels == ["no", "yes"]
    with pytest.raises(ValueError, match=r"got -1 in document 5\."):
        load(str(tmp_path / "saved"), tokenizer)
    data = load(str(tmp_path / "saved"), tokenizer, on_bad_row="skip")
    assert len(data.train) + len(data.eval) == 5


def test_classes_stand_in_the_order_of_the_data_set(tmp_path, tokenizer, caplog):
    """Of one data set, or several that agree; a class without rows is left out."""

    def saved(name, names, labels):
        texts = [f"{text} {name}" for text in TEXTS[:6]]
        named(texts, labels, names).save_to_disk(tmp_path / name)
        return {"path": str(tmp_path / name)}

    first = saved("red", ["up", "none", "down"], [0, 2] * 3)
    same = saved("blue", ["up", "none", "down"], [0, 0, 2] * 2)
    other = saved("gray", ["down", "up"], [0, 1] * 3)
    for sources, order in (
        ([first], ["up", "down"]),
        ([first, same], ["up", "down"]),
        ([first, other], ["down", "up"]),
    ):
        caplog.clear()
        assert load("", tokenizer, sources=sources).labels == order
        assert ("no training rows of 'none'" in caplog.text) == (order == ["up", "down"])


def test_names_that_are_numbers_keep_their_order(tmp_path, tokenizer):
    saved = named(TEXTS[:6], [0, 1, 2] * 2, ["10", "9", "-1"])
    saved.save_to_disk(tmp_path / "saved")
    data = load(str(tmp_path / "saved"), tokenizer, eval={"documents": 1})
    assert data.labels == ["10", "9", "-1"]


def test_copies_of_evaluation_texts_are_not_trained_on(write, tokenizer):
    rows = [*ROWS, {"text": "red  blue", "label": "c"}]
    held_out = write([{"text": "red blue", "label": "a"}], "eval.jsonl")
    data = load(write(rows), tokenizer, eval={"source": {"path": held_out}})
    assert data.duplicates == (2, 0)  # whatever their labels are
    assert data.num_documents == len(data.train) == len(data.trained) == 7
    assert [5, 6] not in [row["input_ids"][1:3].tolist() for row in data.train]
    assert len(data.held_out.fingerprints) == len(data.eval) == 1  # another file, as a whole
    assert data.eval[0]["labels"] == 0


def test_a_long_text_is_cut_and_that_is_told(write, tokenizer, caplog):
    caplog.set_level("INFO")
    long = [{"text": "red " * 20, "label": "a"}]
    data = load(write(ROWS), tokenizer, eval={"source": {"path": write(long, "long.jsonl")}})
    assert data.eval[0]["input_ids"].tolist() == [2, 5, 5, 5, 5, 3]
    assert "1 of 1 evaluation rows fill data.context_length" in caplog.text
    assert "training rows fill" not in caplog.text


def test_a_word_is_scored_at_its_first_token(write, tokenizer):
    rows = [
        {"text": ["redish", "blue"], "label": ["x", "y"]},
        {"text": ["blue"], "label": ["y"]},
        {"text": ["gray"], "label": ["x"]},
    ]
    held_out = write([{"text": ["gray", "gray"], "label": ["x", "x"]}], "eval.jsonl")
    task = "token_classification"
    data = load(write(rows), tokenizer, task=task, eval={"source": {"path": held_out}})
    assert data.train[0]["input_ids"].tolist() == [2, 5, 8, 6, 3]
    assert data.train[0]["labels"].tolist() == [-100, 0, -100, 1, -100]
    assert data.unigram_counts.tolist() == [2, 2]
    batch = data.collator([data.train[0], data.train[1]])
    assert batch["labels"].tolist() == [[-100, 0, -100, 1, -100], [-100, 1, -100, -100, -100]]


def test_a_trained_model_keeps_its_classes(write, tokenizer, caplog):
    path = write(ROWS)
    assert load(path, tokenizer, labels=["c", "b", "a", "z"]).labels == ["c", "b", "a", "z"]
    with pytest.raises(ValueError, match=r"expected the model's classes, 'a', 'b', got 'c'"):
        load(path, tokenizer, labels=["a", "b"])
    with pytest.raises(ValueError, match=r"expected the model's classes, 'x', 'y', got 'a', 'b'"):
        load(path, tokenizer, labels=["x", "y"])
    assert "integers" not in caplog.text


def test_integers_are_the_names_or_the_numbers_of_a_trained_models_classes(
    write, tokenizer, tmp_path, caplog
):
    rows = [{"text": text, "label": i % 2 + 1} for i, text in enumerate(TEXTS[:6])]
    path = write(rows)
    for names, numbers in ((["a", "b", "c"], {1, 2}), (["2", "0", "1"], {0, 2})):
        data = load(path, tokenizer, labels=names, eval={"documents": 0})
        assert {int(data.train[i]["labels"]) for i in range(6)} == numbers
        assert data.train[0]["labels"] == (1 if names[0] == "a" else 2)
        is_said = "the model's numbers of its classes, '0 is a', '1 is b', '2 is c'." in caplog.text
        assert is_said == (names[0] == "a")
        caplog.clear()
    with pytest.raises(ValueError, match=r"expected the model's classes, .* got '1'"):
        load(path, tokenizer, labels=["x", "2"])
    datasets.Dataset.from_list(rows).to_csv(table := tmp_path / "rows.csv")
    data = load(str(table), tokenizer, labels=["a", "b", "c"])
    assert data.train[0]["labels"] == 1
    others = [{**row, "label": i % 2} for i, row in enumerate(rows)]
    with pytest.raises(ValueError, match=r"expected the model's classes, '2', '3', got '0', '1'"):
        load(write(others, "others.jsonl"), tokenizer, labels=["2", "3"])  # numbers are names there
    mixed = write([*rows, {"text": "red gray red", "label": "a"}], "mixed.jsonl")
    with pytest.raises(ValueError, match=r"expected the model's classes, .* got '1', '2'"):
        load(mixed, tokenizer, labels=["a", "b", "c"])


def test_evaluations_need_no_weights(tmp_path, write, tokenizer):
    held_out = write(ROWS, "eval.jsonl")
    weighted = [{**row, "text": row["text"][::-1], "weight": i / 2} for i, row in enumerate(ROWS)]
    datasets.Dataset.from_list(weighted).to_csv(table := tmp_path / "train.csv")
    settings = {"weight_column": "weight", "eval": {"source": {"path": held_out}}}
    data = load(str(table), tokenizer, **settings)
    assert data.train[3]["label_weights"] == 1.5
    assert "label_weights" not in data.eval[0]
    assert len(load(held_out, tokenizer, eval_only=True, weight_column="weight").eval) == len(ROWS)


def test_columns_that_are_not_there_are_named(write, tokenizer):
    path = write(ROWS)
    message = r"data.label_column: expected one of \['label', 'text'\], got 'lable'. .*'label'"
    with pytest.raises(ValueError, match=message):
        load(path, tokenizer, label_column="lable")
    with pytest.raises(ValueError, match=r"data.weight_column: expected one of .* got 'wieght'"):
        load(path, tokenizer, weight_column="wieght")
    with pytest.raises(ValueError, match=r"data.sources.0.column: expected one of"):
        load(path, tokenizer, sources=[{"path": path, "column": "body"}])
    with pytest.raises(
        ValueError, match=r"data.label_column: expected a column for classification"
    ):
        load(path, tokenizer, label_column=None)


def test_classes_that_cannot_be_trained_are_refused(write, tokenizer):
    one = [{"text": text, "label": "a"} for text in TEXTS]
    with pytest.raises(ValueError, match=r"expected two classes or more .* got \['a'\]"):
        load(write(one), tokenizer)
    with pytest.raises(ValueError, match="expected strings or integers, got both"):
        load(write([*ROWS, *({"text": f"red {i}", "label": i} for i in range(3))]), tokenizer)
    unseen = write([{"text": "red", "label": "z"}], "eval.jsonl")
    with pytest.raises(ValueError, match=r"data.eval: expected labels that the training .* 'z'"):
        load(write(ROWS), tokenizer, eval={"source": {"path": unseen}})
    with pytest.raises(ValueError, match=r"data.eval.documents: expected fewer than"):
        load(write(ROWS), tokenizer, eval={"documents": 8})
    blank = {"source": {"path": write([{"text": " ", "label": "a"}], "blank.jsonl")}}
    with pytest.raises(ValueError, match=r"data.eval.source: expected documents with text"):
        load(write(ROWS), tokenizer, eval=blank, on_bad_row="skip")


def test_bad_rows_stop_or_are_counted(write, tokenizer):
    path = write([*ROWS, {"text": 5, "label": "a"}])
    reason = r"text: expected text, got int 5 in .*, line 9\..*on_bad_row: skip"
    with pytest.raises(ValueError, match=reason):
        load(path, tokenizer)
    data = load(path, tokenizer, on_bad_row="skip")
    assert data.bad_rows.total == 1
    assert len(data.train) == 6
    path = write([{"text": ["red"], "label": ["x"]}, {"text": "red", "label": ["x"]}])
    with pytest.raises(ValueError, match=r"expected a list of words, got str in .*, line 2\."):
        load(path, tokenizer, task="token_classification", eval={"documents": 0})


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("mask", {"mask": {"probability": 0.5}}),
        ("packing", {"packing": True}),
        ("padding_free", {"padding_free": True}),
        ("sources.streaming", {"sources": [{"path": "x.jsonl", "streaming": True}]}),
        ("sources.weight", {"sources": [{"path": "x.jsonl", "weight": 1.0}]}),
        ("sources.format", {"sources": [{"path": "x.jsonl", "format": "alpaca"}]}),
    ],
)
def test_settings_without_effect_are_refused(write, tokenizer, key, fields):
    with pytest.raises(ValueError, match=rf"data.{key}: expected the default for classification"):
        load(write(ROWS), tokenizer, **fields)


def test_blank_texts_are_left_out_and_counted(write, tokenizer):
    data = load(write([{"text": "  ", "label": "a"}, *ROWS]), tokenizer)
    assert (len(data.train), data.bad_rows.blank) == (6, 1)
    words = [{"text": ["red"], "label": [label]} for label in "xy"]
    path = write([*words, {"text": [], "label": []}])
    data = load(path, tokenizer, task="token_classification", eval={"documents": 0})
    assert (len(data.train), data.bad_rows.blank) == (2, 1)


def test_labels_of_words_that_are_cut_are_warned_of(write, tokenizer, caplog):
    rows = [{"text": ["red"] * 9, "label": ["x", "y", "x"] * 3}] * 2
    data = load(write(rows), tokenizer, task="token_classification", eval={"documents": 0})
    assert (data.train[0]["labels"] != -100).sum() == 4
    assert ["2 of 2 training rows fill" in message for message in caplog.messages] == [True]
