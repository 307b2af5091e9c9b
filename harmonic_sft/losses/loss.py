"""What every loss of a configuration is."""

from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.models import Head, LossFunction


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Loss:
    """A value whose fields are a loss's settings; `prepare` makes the loss that a model calls."""

    name: str
    needs: ClassVar[str]  # what `prepare` takes from a head, of a loss without a `__call__`

    def check(self, head: Head) -> None:
        """Refuse a head that the loss does not fit.

        Args:
            head: Also one without values, on the meta device.

        Raises:
            ValueError: It does not.
        """

    def prepare(self, head: Head) -> LossFunction:
        """Return this loss, after `check`, or what it becomes with what it needs of the head.

        Raises:
            ValueError: The head does not fit.
        """
        self.check(head)
        return self

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token.

        Args:
            head: Maps `[N, D]` to logits `[N, V]`.
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats.

        Raises:
            ValueError: `prepare` has to be called first, for what the loss needs of a head.
        """
        raise ValueError(
            f"loss {self.name}: expected {self.needs}, got none. Call what prepare(head) returns"
        )
