"""`python -m harmonic_sft`: the command `harmonic-sft`."""

import sys

from harmonic_sft_cli import main

if __name__ == "__main__":
    sys.exit(main())
