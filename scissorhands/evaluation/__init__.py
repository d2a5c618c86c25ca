"""Evaluation: what a budget costs, measured on real text. Needs torch, but for the command and the texts."""
