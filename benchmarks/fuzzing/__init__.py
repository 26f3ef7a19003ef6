"""The homes that `fuzz_home.py` damages, the ways in which it does, and what it makes of the answers."""
