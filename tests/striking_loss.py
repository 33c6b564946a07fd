"""A loss that ends a rank, for the tests of what becomes of the others."""

import itertools
import os
import signal
import time

import torch
import torch.distributed as dist

from staleflow.trainer.losses import TokenLoss, Tokens

calls = itertools.count()


def strike(policy_logprobs: torch.Tensor, tokens: Tokens, *, how: str) -> TokenLoss:
    """The second time, end rank 1. The others go on to the next collective, or hang where nothing reaches them."""
    if next(calls) == 1 and how != "never":
        if dist.get_rank() == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("this rank cannot go on")
        while how == "raise while others hang":
            time.sleep(1)
    return TokenLoss(-tokens.advantages * policy_logprobs, policy_logprobs > 0)
