"""What anybody runs on their own scripts and runs: seeds, compare, check, diff."""
