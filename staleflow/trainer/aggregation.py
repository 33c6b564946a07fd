"""Aggregation: how much each token's loss counts in the loss of an update.

All tokens of a sequence count the same, so an aggregation is one number per sequence; the loss of an update is the
sum over its tokens of share times loss. Shares depend only on the lengths of the update's sequences, never on which
of them a micro-batch holds.
"""

from typing import assert_never

from torch import Tensor

from staleflow.trainer.loss_settings import AggregationKind


def token_shares(lengths: Tensor, kind: AggregationKind, longest_tokens: int | None) -> Tensor:
    """Share of every token of each sequence, ``[sequences]``, from how many tokens each has, ``[sequences]``."""
    match kind:
        case "token_mean":
            return lengths.new_ones(len(lengths)).double() / lengths.sum()
        case "sequence_mean":
            return 1 / (len(lengths) * lengths.double())
        case "sequence_sum":
            if longest_tokens is None:
                raise ValueError("sequence_sum needs longest_tokens")
            return lengths.new_ones(len(lengths)).double() / (len(lengths) * longest_tokens)
        case _:
            assert_never(kind)
