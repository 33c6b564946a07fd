"""Do trainer and engines mean the same by a logprob? Decided from figures alone, where their weights are equal.

The mean ratio cannot tell: the mean of ``p(x) / q(x)`` over samples of q is 1 for any two distributions, whatever they
are. The size of the gaps between logprobs can, and their shape says where they come from.
"""

from staleflow.types import Agreement

GAP_RMS_LIMIT = 0.03
"""Twice what bfloat16 kernels that add up in different orders typically differ by."""
ENOUGH_TOKENS = 16
UNRELATED_CORRELATION = 0.9
ONE_SIDED_SHARE = 0.8
EXPLAINED_SHARE = 0.75
SLOPE_LIMIT = 0.03


def disagreement(agreement: Agreement) -> str | None:
    """What to tell the user, with the likely cause; None when the gaps are no more than rounding."""
    if agreement.gap_rms <= GAP_RMS_LIMIT:
        return None
    return (
        f"trainer and engines disagree although their weights are equal: over {agreement.tokens} tokens their logprobs "
        f"differ by {agreement.gap_rms:.3f} (root mean square; {GAP_RMS_LIMIT:g} would be rounding), the mean ratio is "
        f"{agreement.ratio_mean:.3f}. Likely cause: {_likely_cause(agreement)}"
    )


def _likely_cause(agreement: Agreement) -> str:
    if agreement.tokens < ENOUGH_TOKENS:
        return "too few tokens to tell"
    if agreement.correlation < UNRELATED_CORRELATION:
        return "another model or tokenizer, or tokens out of line by one: the logprobs hardly go together"
    # Logits divided by another temperature give logprobs that are about a constant factor apart.
    if abs(agreement.slope - 1) > SLOPE_LIMIT and agreement.residual_rms < EXPLAINED_SHARE * agreement.gap_rms:
        return (
            f"temperature: the engines' logprobs look like those at {agreement.slope:.2f} times the trainer's; give "
            "both the same, and record logprobs after it is applied"
        )
    if abs(agreement.gap_mean) > ONE_SIDED_SHARE * agreement.gap_rms:
        return (
            "logprob mode: nearly all gaps have one sign, as when one side leaves tokens out of the distribution "
            "(top-p, top-k, a padded vocabulary) and the other does not"
        )
    return "dtype or kernels: the gaps look like noise; compute logprobs in float32 on both sides"
