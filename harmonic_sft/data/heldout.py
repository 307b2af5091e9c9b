"""Held-out documents: their fingerprints, their copies in training data, who trained on them."""

import os
import re
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unicodedata import category, normalize

import numpy as np

from harmonic_sft.results import read_results, reading, without_secrets, write_results

NGRAM = 13  # words
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying loses no bit of any word
# Writing systems without spaces between words: every character is a word.
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\U0003ffff"
# Vowel signs and accents belong to words, but `\w` does not match them.
MARKS = "".join(sign for sign in map(chr, range(0x2E80)) if category(sign) in ("Mn", "Mc"))
WORD = re.compile(rf"(?:[^\W{UNSPACED}]|[{MARKS}])+|(?=\w)[{UNSPACED}]")
LIST, TRAINED = "held_out", "trained_documents.npy"  # in the folder `results` of a run
SAME_SOURCE = ("path", "name", "split", "data_files", "revision", "column")

Kind = Literal["exact", "near"]
Verdict = Literal["unseen", "seen", "unknown"]
COPIES = (  # filled with a `Duplicates`
    "Copies of held-out documents: %d exact ones, left out, and %d near ones, which "
    "data.eval.drop_near_duplicates leaves out."
)


class Duplicates(NamedTuple):
    """How many training documents are copies of held-out ones."""

    exact: int = 0
    near: int = 0

    def plus(self, kinds: Sequence[Kind | None]) -> "Duplicates":
        """Return the counts with documents of these kinds added."""
        return Duplicates(self.exact + kinds.count("exact"), self.near + kinds.count("near"))


class Ancestor(NamedTuple):
    """A model, and whether documents are new to it; `documents_seen` counts those that are not."""

    model: str
    verdict: Verdict
    documents_seen: int = 0


def fingerprint(text: str) -> str:
    """Return 32 hexadecimal digits that name a document by its text, all turns included.

    Texts that differ only in white space or Unicode form (NFC, NFD) have the same name.
    """
    plain = " ".join(normalize("NFC", text).split()).encode("utf-8", "surrogatepass")
    return sha256(plain).hexdigest()[:32]


def word_hashes(text: str) -> np.ndarray:
    """Return the hash of every word, `[W]` uint32, without case and punctuation.

    Pass only the document's own text, without templates, system prompts and prompts.
    """
    words = WORD.findall(normalize("NFC", text).lower())
    return np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint32)


def ngram_hashes(words: np.ndarray) -> np.ndarray:
    """Return the distinct hashes of all 13-grams, `[G]` uint64, sorted; empty below 13 words.

    Source:
        13-grams of lower-case words without punctuation: Brown et al. 2020, Language Models are
        Few-Shot Learners, arXiv:2005.14165, appendix C. There one common 13-gram is enough.
    """
    count = max(0, len(words) - NGRAM + 1)
    hashes, words = np.zeros(count, dtype=np.uint64), words.astype(np.uint64)
    for place in range(NGRAM):
        hashes = hashes * FACTOR + words[place : place + count]
    return np.unique(hashes)


@dataclass(frozen=True)
class HeldOut:
    """Documents that are kept out of training."""

    fingerprints: Sequence[str] = ()
    ngrams: Sequence[np.ndarray] = ()  # of each document, `[G]`, from `ngram_hashes`
    drop_near: bool = False  # whether near duplicates leave the training data too

    @classmethod
    def of(
        cls, documents: Iterable[tuple[str, np.ndarray]], *, drop_near: bool = False
    ) -> "HeldOut":
        """List documents by their fingerprints and word hashes."""
        traces = [(name, ngram_hashes(words)) for name, words in documents]
        return cls([name for name, _ in traces], [hashes for _, hashes in traces], drop_near)

    @cached_property
    def digest(self) -> str:
        """The sha256 of the list, whatever its order; it tells nothing about a single document."""
        return sha256("\n".join(sorted(self.fingerprints)).encode()).hexdigest()

    def kind_of(self, document: str, words: np.ndarray) -> Kind | None:
        """Compare a document, given by its fingerprint and `[W]` word hashes, with the list.

        Returns:
            `exact` for the same text; `near` if more than half of its distinct 13-grams stand in
            one document of the list; None if the document is no copy.
        """
        if document in self._names:
            return "exact"
        listed, owners = self._index
        if len(words) < NGRAM or not len(listed):
            return None
        hashes = ngram_hashes(words)
        first = np.searchsorted(listed, hashes)
        shared = hashes[listed.take(first, mode="clip") == hashes]
        if 2 * len(shared) <= len(hashes):  # true of most documents, so owners are rarely counted
            return None
        ends = (np.searchsorted(listed, shared, side=side) for side in ("left", "right"))
        their_owners = np.concatenate([owners[i:j] for i, j in zip(*ends, strict=True)])
        return "near" if 2 * np.bincount(their_owners).max() > len(hashes) else None

    def drops(self, kind: Kind | None) -> bool:
        """Tell whether a document of this kind is taken out of the training data."""
        return kind == "exact" or (kind == "near" and self.drop_near)

    def drop_copies(
        self, documents: Iterable[tuple[str, np.ndarray]]
    ) -> tuple[np.ndarray, Duplicates, np.ndarray]:
        """Take copies of held-out documents out of the training documents.

        Returns:
            Which documents are kept, `[documents]` bool; how many copies there were, kept ones
            included; and the `short_hashes` of the kept documents.

        Raises:
            ValueError: No document would be kept.
        """
        hashes, kinds = array("Q"), []
        for name, words in documents:
            hashes.append(_short_hash(name))
            kinds.append(self.kind_of(name, words))
        is_kept = np.array([not self.drops(kind) for kind in kinds], dtype=bool)
        if not is_kept.any():
            raise ValueError(
                "data.eval: expected training documents besides copies of held-out ones, got "
                f"{len(is_kept)} copies. Add sources"
            )
        return is_kept, Duplicates().plus(kinds), np.unique(np.array(hashes)[is_kept])

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.fingerprints)

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """All 13-grams of the list, sorted, and the document of each, both `[G]`."""
        hashes = np.concatenate([*self.ngrams, np.zeros(0, np.uint64)])
        owners = np.repeat(np.arange(len(self.ngrams)), [len(part) for part in self.ngrams])
        order = np.argsort(hashes, kind="stable")
        return hashes[order], owners[order]


def short_hashes(fingerprints: Sequence[str]) -> np.ndarray:
    """Return the first 64 bits of fingerprints, uint64, sorted and distinct."""
    return np.unique(np.array([_short_hash(name) for name in fingerprints], dtype=np.uint64))


def _short_hash(fingerprint: str) -> int:
    return int(fingerprint[:16], 16)


def record(
    folder: Path,
    held_out: HeldOut,
    *,
    sources: Sequence[Mapping[str, Any]],
    eval_source: Mapping[str, Any] | None,
    base: str | None,
    trained: np.ndarray | None,
) -> None:
    """Write what `lineage` reads into a run's folder; only the digest may ever be published.

    Args:
        folder: The run's folder.
        held_out: Documents that the run does not train on.
        sources: Where the training documents come from, as in `data.sources`.
        eval_source: Where the evaluation documents come from; None for the same sources.
        base: `model.base`, None for random weights.
        trained: `short_hashes` of the training documents, None for a stream.
    """
    base_digest = None if base is None else (_read(run_home(base)) or {}).get("digest")
    payload = {
        "digest": held_out.digest,
        "fingerprints": list(held_out.fingerprints),
        "sources": [_recorded(source) for source in sources],
        "eval_source": None if eval_source is None else _recorded(eval_source),
        "base": base,
        "base_digest": base_digest,
    }
    write_results(folder / "results", LIST, payload)
    (folder / "results" / TRAINED).unlink(missing_ok=True)  # left by a run that ended at its start
    if trained is not None:
        np.save(folder / "results" / TRAINED, trained)


def lineage(
    model: str | None, fingerprints: Sequence[str], sources: Sequence[Mapping[str, Any]]
) -> list[Ancestor]:
    """Tell whether a model, its base, that base's base and so on were trained on documents.

    docs/data.md has the table of verdicts.

    Args:
        model: Folder or name; None for random weights, which have seen nothing.
        fingerprints: The documents' fingerprints.
        sources: Where the documents come from, as in `data.sources`.

    Returns:
        One entry for each model, up to the first one that is not known.
    """
    found: list[Ancestor] = []
    expected: str | None = None
    while model is not None:
        folder = run_home(model)
        saved = _read(folder)
        if saved is None or (found and saved["digest"] != expected):
            return [*found, Ancestor(model, "unknown")]
        found.append(_judge(model, saved, folder / "results" / TRAINED, fingerprints, sources))
        model, expected = saved["base"], saved["base_digest"]
    return found


def seen_by(ancestors: Sequence[Ancestor], num_documents: int) -> str | None:
    """Say which model was trained on evaluation documents; None if none is known to have been."""
    for ancestor in ancestors:
        if ancestor.verdict == "seen":
            share = f"{ancestor.documents_seen} of the {num_documents} documents"
            return f"{ancestor.model} was trained without holding out {share}"
    return None


def _judge(
    model: str,
    saved: Mapping[str, Any],
    trained: Path,
    fingerprints: Sequence[str],
    sources: Sequence[Mapping[str, Any]],
) -> Ancestor:
    not_held_out = sorted(set(fingerprints).difference(saved["fingerprints"]))
    if trained.is_file():
        with reading(trained):
            known = np.load(trained, allow_pickle=False)
        seen = int(np.isin(short_hashes(not_held_out), known).sum())
        return Ancestor(model, "seen" if seen else "unseen", seen)
    if not not_held_out:
        return Ancestor(model, "unseen")
    own = [_identity(source) for source in saved["sources"]]
    if any(_identity(source) in own for source in sources):
        return Ancestor(model, "seen", len(not_held_out))
    return Ancestor(model, "unknown")


def _recorded(source: Mapping[str, Any]) -> dict[str, Any]:
    is_local = os.path.exists(os.path.expanduser(source["path"]))
    return {**_identity(source), "is_local": is_local}


def _identity(source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: without_secrets(source.get(key)) for key in SAME_SOURCE}


def run_home(folder: str | Path) -> Path:
    """Return the folder of the run that a folder, perhaps a checkpoint, belongs to."""
    folder = Path(os.path.expanduser(folder))
    is_checkpoint = folder.name.startswith("checkpoint-") and not (folder / "run.yaml").is_file()
    return folder.parent if is_checkpoint else folder


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / "results" / f"{LIST}.json"
    return read_results(path, "fingerprints") if path.is_file() else None
