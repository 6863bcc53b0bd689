import numpy as np
import pytest

from celo2.metatrain.divergence import Limits, Streaks, inspect
from celo2.metatrain.outer import MetaMetrics

NONE = Streaks()


def metrics(loss, weight_norm=1.0, bad_entries=0, gradient_norm=1.0) -> MetaMetrics:
    given = {
        "loss": loss,
        "weight_norm": weight_norm,
        "bad_entries": bad_entries,
        "gradient_norm": gradient_norm,
    }
    columns = {name: np.broadcast_to(value, len(loss)) for name, value in given.items()}
    rest = {name: np.ones(len(loss)) for name in MetaMetrics._fields}
    return MetaMetrics(**(rest | columns))


def look(found, streaks=NONE, patience=20):
    return inspect(streaks, Limits(weight_norm=10.0, patience=patience), 3.0, 7, 100, found)


def test_good_iterations_are_no_trouble():
    assert look(metrics([2.0, 1.0, 2.9])) == (Streaks(), [])


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (metrics([1.0, np.nan]), "meta-loss is nan"),
        (metrics([1.0, 1.0], [1.0, np.inf]), "no longer finite"),
        (metrics([1.0, 1.0], [1.0, np.nan]), "no longer finite"),
        (metrics([1.0, 1.0], [1.0, 10.5]), "norm 10.5, above 10"),
    ],
)
def test_what_cannot_heal_is_fatal_at_its_iteration(found, cause):
    _, (trouble,) = look(found)
    assert trouble.fatal and trouble.iteration == 100 and cause in trouble.cause


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (metrics([2.99] * 10), "meta-loss is at its limit"),
        (metrics([1.0] * 10, bad_entries=7), "no entry of the meta-gradient is finite"),
    ],
)
def test_streak_is_told_once_and_fatal_at_the_end_of_patience(found, cause):
    streaks, (warning,) = look(found)
    assert not warning.fatal and warning.iteration == 92 and cause in warning.cause
    _, (fatal,) = look(found, streaks)
    assert fatal.fatal and fatal.iteration == 100
    assert "20 iterations in a row" in fatal.cause
    assert look(found, streaks, patience=21)[1] == []


def test_zero_gradient_is_told_once_and_never_fatal():
    found = metrics([1.0] * 10, gradient_norm=0.0)
    streaks, (warning,) = look(found)
    assert streaks == Streaks(idle=10) and not streaks.bad
    assert not warning.fatal and warning.iteration == 92
    assert "meta-gradient is zero, so the rule learns nothing, for 2 iter" in warning.cause
    assert look(found, streaks) == (Streaks(idle=20), [])
    one = look(metrics([1.0], gradient_norm=0.0), patience=1)
    assert [trouble.fatal for trouble in one[1]] == [False]


@pytest.mark.parametrize(("loss", "bad_entries"), [(2.99, 0), (1.0, 7)])
def test_zero_gradient_for_a_known_reason_is_not_told(loss, bad_entries):
    streaks, troubles = look(metrics([loss] * 5, 1.0, bad_entries, gradient_norm=0.0))
    assert streaks.bad and streaks.idle == 0 and len(troubles) == 1


def test_one_good_iteration_ends_a_streak():
    streaks, _ = look(metrics([2.99] * 5 + [2.0] + [2.99] * 4))
    assert streaks == Streaks(stuck=4)


def test_some_bad_entries_are_no_streak():
    assert look(metrics([1.0], bad_entries=6))[0] == Streaks()
