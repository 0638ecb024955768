"""Comparisons of holdfast with other libraries, and tests of its promise to survive being killed.

``python -m benchmarks.compare`` times and weighs saving and loading; ``python -m benchmarks.kills`` kills a saving
process at random moments and checks what is left. Both run from the repository's root; docs/benchmarks.md explains
each number.
"""
