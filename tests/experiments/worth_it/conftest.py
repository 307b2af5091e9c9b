"""The data of the protocol in miniature."""

import random

import pytest

from experiments.worth_it import classes, masked


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with 23 intents, 20 of which are out of scope, SST-2, and 12, 7 and 6 articles."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "probing").mkdir()
    (folder / "text").mkdir()
    generator = random.Random(0)

    def text(count, words=("aa", "ab", "ba", "bc", "ca", "da", "db", "zz")):
        return " ".join(generator.choices(words, k=count))

    for split, count in (("train", 12), ("test", 3)):
        numbers = [i for i in range(23) for _ in range(count)]
        rows = [f"{text(generator.randint(2, 9))},intent{i:02d}" for i in numbers]
        path = folder / "probing" / f"banking77_{split}.csv"
        path.write_text("\n".join(["text,category", *rows]))
    for split, count in (("train", 30), ("dev", 8)):
        rows = [f"{text(generator.randint(2, 9))} aa\t{i % 2}" for i in range(count)]
        path = folder / "probing" / f"sst2_{split}.tsv"
        path.write_text("\n".join(["sentence\tlabel", *rows]))

    def document():
        return text(30, ("aa", "ab", "ba", "ca", "da")) + " <unk>"

    for name, count in (("valid", 12), ("test", 7)):
        articles = [
            f" \n = T {n} = \n \n {document()}\n = = S = = \n {document()}\n = no title \n"
            for n in range(count)
        ]
        (folder / "text" / f"wikitext2_{name}.txt").write_text("".join(articles))
    (folder / "text" / "wiki_articles.txt").write_text("\n".join(document() for _ in range(6)))
    return folder


@pytest.fixture(scope="module")
def small():
    """Few validation rows of classes; masked rows of 12 tokens, 3 of them hidden."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes, "NUM_VALIDATION", {"banking77": 6, "sst2": 6})
        for name, value in (("ROW_TOKENS", 12), ("NUM_MASKED", 3), ("FITTED_TOKENS", 16)):
            patch.setattr(masked, name, value)
        yield
