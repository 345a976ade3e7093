"""Drop fractions and update schedules, which are functions of the step alone."""

import copy
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snack_cupy import dst


def test_drop_fractions():
    for step in (0, 1, 50, 99, 100, 10**12):
        assert dst.constant(0.3)(step) == 0.3
        cosine, linear = dst.cosine(0.3, 100)(step), dst.linear(0.3, 100)(step)
        if step >= 100:
            assert cosine == linear == 0
        else:
            assert cosine == pytest.approx(0.15 * (1 + math.cos(math.pi * step / 100)))
            assert linear == pytest.approx(0.3 * (1 - step / 100))
    for schedule in (dst.cosine(1.0, 7), dst.linear(1.0, 7)):
        fractions = [schedule(step) for step in range(9)]
        assert fractions[0] == 1
        assert fractions == sorted(fractions, reverse=True)
        assert fractions[6] > fractions[7] == fractions[8] == 0


@given(every=st.integers(1, 9), start=st.integers(0, 20), length=st.integers(-1, 40))
def test_update_schedule(every, start, length):
    stop = None if length < 0 else start + length
    schedule = dst.UpdateSchedule(every, start, stop)
    want = {start + i * every for i in range(1, 100)}
    want = {step for step in want if stop is None or step < stop}
    done = 0
    for step in range(70):
        assert schedule.due(step) == (step in want)
        done += step in want
        assert schedule.count(step) == done


def test_schedules_are_values():
    for schedule in (dst.constant(0.3), dst.cosine(0.3, 9), dst.UpdateSchedule(5, 1, 9)):
        assert pickle.loads(pickle.dumps(schedule)) == schedule == copy.deepcopy(schedule)
        assert hash(schedule) == hash(copy.copy(schedule))
    assert dst.cosine(0.3, 9) != dst.linear(0.3, 9)
    assert repr(dst.UpdateSchedule(5)) == "UpdateSchedule(update_every=5, start=0, stop=None)"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dst.constant(1.5), ValueError, r"initial must be in \[0, 1\], got 1.5"),
        (lambda: dst.cosine(math.nan, 3), ValueError, r"initial must be in \[0, 1\], got nan"),
        (lambda: dst.linear(-0.1, 3), ValueError, r"initial must be in \[0, 1\], got -0.1"),
        (lambda: dst.cosine(0.3, 0), ValueError, "stop must be between 1 and"),
        (lambda: dst.linear(0.3, None), TypeError, "stop must be an integer, got None"),
        (lambda: dst.DropFraction(0.3, "step"), ValueError, "decay must be one of"),
        (lambda: dst.DropFraction(0.3, "constant", 9), ValueError, "stop must be None"),
        (lambda: dst.constant(0.3)(-1), ValueError, "step must be between 0 and"),
        (lambda: dst.cosine(0.3, 3)(0.5), TypeError, "step must be an integer, got 0.5"),
        (lambda: dst.UpdateSchedule(0), ValueError, "update_every must be between 1 and"),
        (lambda: dst.UpdateSchedule(1.0), TypeError, "update_every must be an integer"),
        (lambda: dst.UpdateSchedule(1, -1), ValueError, "start must be between 0 and"),
        (lambda: dst.UpdateSchedule(1, 5, 4), ValueError, "stop must be between 5 and .*, got 4"),
        (lambda: dst.UpdateSchedule(1).due(-1), ValueError, "step must be between 0 and"),
        (lambda: dst.UpdateSchedule(1).count(None), TypeError, "step must be an integer"),
    ],
)
def test_schedules_refuse(make, error, message):
    with pytest.raises(error, match=message):
        make()
