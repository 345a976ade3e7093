"""The numbers of `snack_cupy.random` in plain Python, one at a time, and a chi-square test."""

import math

import numpy as np
from scipy import stats

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def assert_uniform(counts, variance_factor=1.0):
    """Chi-square test that the cells are equally likely, at the level 0.001."""
    counts = np.asarray(counts, np.float64).ravel()
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2).sum() / (expected * variance_factor)
    assert stats.chi2.sf(statistic, counts.size - 1) > 1e-3


def splitmix(key, counter):
    word = (key + (counter + 1) * GOLDEN) % WORD
    return mix(word)


def mix(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def image(key, rank, domain):
    """Image of one rank, by walking until it falls into the domain."""
    a = math.isqrt(domain - 1) + 1
    b = (domain + a - 1) // a
    while True:
        left, right = divmod(rank, b)
        for i in range(24 if domain < 2**16 else 12):
            round_key = splitmix(key, i)
            if i % 2 == 0:
                left = (left + ((mix((right + round_key) % WORD) >> 32) * a >> 32)) % a
            else:
                right = (right + ((mix((left + round_key) % WORD) >> 32) * b >> 32)) % b
        rank = left * b + right
        if rank < domain:
            return rank
