"""Training: the protocol in ``base``, the local child in ``local``, plain torch in ``learner`` and ``losses``."""
