"""Dynamic sparse training on plain arrays: which connections go, which come, what moves along.

`restructure` is one update; it returns the new structure and a `Remap`, and changes nothing itself:

>>> import numpy as np
>>> from snack_cupy import dst, random
>>> topology = random.random_topology((4, 10), density=0.2, seed=3)
>>> values = np.arange(1.0, 9.0)
>>> row_offsets, columns, remap = dst.restructure(topology, values, 0.25, key=random.key(1))
>>> topology.update(row_offsets, columns)
>>> remap.apply(values)
array([3., 4., 5., 6., 0., 0., 7., 8.])
"""

from snack_cupy.dst.drop import random_drop, smallest_magnitude
from snack_cupy.dst.gradient import GradientGrowth, grow_by_gradient
from snack_cupy.dst.grow import random_growth
from snack_cupy.dst.remap import Remap
from snack_cupy.dst.restructure import grow, prune, restructure
from snack_cupy.dst.schedule import DropFraction, UpdateSchedule, constant, cosine, linear

__all__ = [
    "DropFraction",
    "GradientGrowth",
    "Remap",
    "UpdateSchedule",
    "constant",
    "cosine",
    "grow",
    "grow_by_gradient",
    "linear",
    "prune",
    "random_drop",
    "random_growth",
    "restructure",
    "smallest_magnitude",
]
