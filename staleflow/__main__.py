"""``python -m staleflow``."""

import sys

from staleflow.cli import main

sys.exit(main())
