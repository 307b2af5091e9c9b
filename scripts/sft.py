"""Train one run: accelerate launch scripts/sft.py configs/X.yaml [key=value ...]."""

import sys

from harmonic_sft_cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
