"""Benchmarks of one policy: sampling whole evaluation sets, votes, and the numbers from them."""
