"""Training: the protocol in ``base``, the local child in ``local``, and what it computes, on plain torch."""
