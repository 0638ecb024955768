"""Measurements of holdfast beside its peers, and of its promise to survive being killed.

``python -m benchmarks.compare`` times and weighs saving and loading; ``python -m benchmarks.kills`` kills a saving
process at random moments and checks what is left. Both run from the repository's root; docs/benchmarks.md says how
each number comes about.
"""
