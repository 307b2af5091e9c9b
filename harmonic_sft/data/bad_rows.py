"""Rows that cannot be used: why, where they stand, and how many are left out."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from harmonic_sft.results import without_secrets

BLANK = "expected text, got a blank one"  # the reason for a document without a single token
SHOWN_REASONS = 5


class BadRow(ValueError):
    """Why a row cannot be used; the message is the reason."""


@dataclass
class BadRows:
    """Rows that are left out and counted, or an error where none may be skipped.

    A bad row counts once, however often its place is read. Blank documents are never an error,
    and only counted: there may be too many to keep their places.
    """

    places: dict[str, tuple[str, int]] = field(default_factory=dict)  # reason and number of rows
    blank: int = 0
    unscored_tokens: int = 0  # in the chunks left out because none of their tokens may be predicted
    skip: bool = True

    @property
    def total(self) -> int:
        """How many rows were left out."""
        return self.blank + sum(rows for _, rows in self.places.values())

    @property
    def first(self) -> list[str]:
        """The first few places, each with its reason."""
        shown = islice(self.places.items(), SHOWN_REASONS)
        return [f"{place}: {reason}" for place, (reason, _) in shown]

    def report(self, name: str, place: str, reason: str, rows: int = 1) -> None:
        """Count the unusable rows at one place of the source called `name`.

        Raises:
            ValueError: The rows are not blank, and `skip` is False.
        """
        if reason == BLANK:
            self.blank += 1
        elif self.skip:
            self.places.setdefault(place, (reason, rows))
        else:
            place = place.removeprefix(f"{name}, ")
            raise ValueError(
                f"{name}: {reason} in {place}. Repair it, or set data.on_bad_row: skip."
            )

    @contextmanager
    def caught(self, name: str, place: str) -> Generator[None]:
        """Report a `BadRow` that is raised inside; the arguments are those of `report`."""
        try:
            yield
        except BadRow as error:
            self.report(name, place, str(error))

    def merge(self, other: "BadRows") -> None:
        """Add what another counter has found elsewhere."""
        for place, (reason, rows) in other.places.items():
            self.places.setdefault(place, (reason, rows))
        self.blank += other.blank
        self.unscored_tokens += other.unscored_tokens


def one_line(error: BaseException) -> str:
    """Say in one short line what an exception says."""
    return " ".join(without_secrets(str(error)).split())[:300] or type(error).__name__
