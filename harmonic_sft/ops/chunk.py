"""A chunk of tokens under one softmax: from the sums of the tiles to normalizers and metrics."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harmonic_sft.ops.options import TokenMetrics


@dataclass
class Chunk:
    """The tokens of one chunk under one softmax; each step writes what the next ones read.

    The pairs are those that stay out of the matrix products: labels first, then near prototypes.
    Their distances are taken by direct difference: the label's decides the loss of a confident
    token, and a near prototype's expanded distance would have lost its digits. The sums of a tile
    leave them out; e = exp(logit - log_scale).

    Off the pairs dL/dlogit_j = mass * p_j + second * s_j - floor, with the stage's second weights
    s_j; `CrossEntropyStage.log_share` says what they are divided by.
    """

    tokens: slice  # where they stand among the N
    placed: Tensor  # [T, D], hidden states as the geometry compares them
    inverse: Tensor | None  # [T, 1], 1 / |x| on the sphere; None elsewhere
    unit: Tensor  # [T, 1], of squared distances (`Geometry.unit`); 1 for a linear head
    row_terms: Tensor | None  # [T, 1], what a token's squared distances have in common; None for 0
    near_limits: Tensor  # [T, 1], squared distances below which a prototype is near
    labels: Tensor  # [T, K], columns; -1 where padded or repeated

    # Of the tiles, None where not asked for.
    log_scale: Tensor = field(init=False)  # [tiles, T], the largest logit, or near it
    sums: Tensor = field(init=False)  # [tiles, T], of e
    moments: Tensor | None = None  # [3, tiles, T], sums of e * log e, of e * bias, of the biases
    logit_sums: Tensor | None = None  # [tiles, T]
    best: Tensor | None = None  # [tiles, T], the column of the largest logit
    nearest: Tensor | None = None  # [tiles, T], the least d2 + eps
    second_sums: Tensor = field(init=False)  # [R, tiles, T], for a stage with a second loss

    # Of the pairs.
    columns: Tensor = field(init=False)  # [T, S], their classes; -1 where there is no pair
    absent: Tensor = field(init=False)  # [T, S], where there is no pair
    squared: Tensor = field(init=False)  # [T, S], d2 + eps of distances
    logs: Tensor = field(init=False)  # [T, S], log(squared / unit); 0 where there is no pair
    logits: Tensor = field(init=False)  # [T, S], with the bias; -inf where there is no pair

    log_normalizer: Tensor = field(init=False)  # [T], over all classes, distances in `unit`
    # [T, K], of the labels; -inf where there is none. Accurate also when p is close to 1, so that
    # 1 - p is.
    log_probs: Tensor = field(init=False)
    saved: Tensor = field(init=False)  # [T], the teacher's log-normalizer, or the mean cost

    # Factors of the gradients.
    mass: Tensor = field(init=False)  # [T], of p_j
    target: Tensor = field(init=False)  # [T, K], dL/dlogit of a label is mass * p - target
    rest: Tensor = field(init=False)  # [T, K], mass - target
    floor: Tensor = field(init=False)  # [T], what label smoothing subtracts at every class
    second: Tensor | None = None  # [T], of s_j; None without a second loss

    def reserve(
        self,
        num_tiles: int,
        *,
        measure: bool,
        best: bool,
        smoothed: bool,
        num_sums: int = 0,
        ratios: bool = False,
    ) -> None:
        """Make room for what the tiles write: `measure` for moments, `ratios` for `nearest`."""
        shape, new_empty = (num_tiles, len(self.placed)), self.placed.new_empty
        self.log_scale, self.sums = new_empty(shape), new_empty(shape)
        self.moments = new_empty(3, *shape) if measure else None
        self.best = self.labels.new_empty(shape) if best else None
        self.nearest = new_empty(shape) if ratios else None
        self.logit_sums = new_empty(shape) if smoothed else None
        self.second_sums = new_empty(num_sums, *shape)

    def pair_classes(self, num_classes: int) -> Iterator[Tensor]:
        """Yield the classes `[T]` of the pairs, with distinct ones in the place of absent pairs.

        Their coefficient is 0; thousands of additions to one row would wait for each other on a
        GPU.
        """
        places = torch.arange(len(self.placed), device=self.columns.device) % num_classes
        for classes in self.columns.unbind(1):
            yield torch.where(classes >= 0, classes, places)

    @property
    def near(self) -> Tensor:
        """Logits `[T, S - K]` of the pairs that are near prototypes."""
        return self.logits[:, self.labels.shape[1] :]

    def normalize(self) -> None:
        """Write the log-normalizers and the labels' log-probabilities."""
        labels = self.logits[:, : self.labels.shape[1]]
        # A tile with nothing left has no share, whatever the scale of its last weights was.
        nothing = torch.finfo(self.log_scale.dtype).min / 4
        self.log_scale.masked_fill_(self.sums == 0, nothing)
        others = [self.log_scale + self.sums.log(), self.near.T]
        log_others = torch.cat(others).logsumexp(0)[:, None]  # [T, 1]
        # The sum leaves out the label, so that 1 - p keeps its digits where p is close to 1.
        rests = log_others
        if labels.shape[1] > 1:
            others = [
                torch.cat([log_others, labels[:, :k], labels[:, k + 1 :]], 1).logsumexp(1)
                for k in range(labels.shape[1])
            ]
            rests = torch.stack(others, 1)
        margin = rests - labels
        log_probs = -torch.logaddexp(margin, torch.zeros_like(margin))
        self.log_probs = log_probs.masked_fill_(self.labels < 0, -torch.inf)
        if labels.shape[1] == 1 and not labels.is_cpu:  # one kernel, not eight
            self.log_normalizer = torch.logaddexp(log_others, labels).squeeze(1)
        else:
            self.log_normalizer = torch.cat([log_others, labels], 1).logsumexp(1)

    def metrics(self, target: Tensor, normalizer: Tensor) -> TokenMetrics:
        """Return the metrics of each token.

        Args:
            target: `[T, K]`, probabilities of the labels.
            normalizer: `[T]`, logsumexp of the logits themselves.
        """
        assert self.best is not None, "the best columns were not asked for"
        logits = torch.cat([self.log_scale.T, self.logits], 1)
        columns = torch.cat([self.best.T, self.columns], 1)
        # A tile with nothing left has no best column.
        empty = self.sums.T == 0
        logits[:, : empty.shape[1]].masked_fill_(empty, -torch.inf)
        best = logits.argmax(1, keepdim=True)
        log_probs = (target * self.log_probs).masked_fill_(target == 0, 0).sum(1)
        predictions = columns.gather(1, best).squeeze(1)
        return TokenMetrics(log_probs, normalizer, self._entropies(), predictions)

    def _entropies(self) -> Tensor:
        """Return the entropy of each token's distribution `[T]`, a sum of positive terms."""
        assert self.moments is not None, "moments were not asked for"
        offsets = self.log_scale - self.log_normalizer  # [tiles, T]
        tiles = offsets.exp() * (self.moments[0] + (self.sums * offsets).where(self.sums > 0, 0))
        log_probs = torch.cat([self.log_probs, self.near - self.log_normalizer[:, None]], 1)
        terms = (log_probs.exp() * log_probs).where(log_probs != -torch.inf, 0)
        return -(tiles.sum(0) + terms.sum(1))

    def log_moments(self, h_exp: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of e * log(d2 / unit) and of log(d2 / unit) of each tile, `[tiles, T]`.

        The second is 0 where it was not asked for, without label smoothing.
        """
        assert self.moments is not None, "moments were not asked for"
        entropy, biased, biases = self.moments
        weighted = (entropy + self.log_scale * self.sums - biased) / h_exp
        if self.logit_sums is None:
            return weighted, torch.zeros_like(weighted)
        return weighted, (self.logit_sums - biases) / h_exp
