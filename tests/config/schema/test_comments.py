"""Comments of keys: those of config/defaults.py are the texts that users read."""

import inspect

from hookline.config import defaults, get_cfg
from hookline.config.schema.comments import key_comments

SOURCE = """
# Two lines
# about A.
_C.A = 1
_C.B = 2

_C.C = 3
# ---------------------------- section
_C.S = CN()
# A section's comment.
_C.S.T = CN()
_C.S.T.NAME = ""
_C.S.T.ARGS = CN(new_allowed=True)
_C.S.OTHER = 5
# Of a long value.
_C.S.D = Typed(
    1, int)
_C.S.E = 1
"""


def test_a_comment_is_of_the_key_below_and_of_those_that_follow():
    assert key_comments(SOURCE) == {
        "A": "Two lines about A.",
        "B": "Two lines about A.",
        "S.T": "A section's comment.",
        "S.T.NAME": "A section's comment.",
        "S.T.ARGS": "A section's comment.",
        "S.D": "Of a long value.",
        "S.E": "Of a long value.",
    }


def test_every_key_has_a_comment():
    comments = key_comments(inspect.getsource(defaults))
    assert [key for key in get_cfg().flatten() if key not in comments] == []
    assert comments["SOLVER.AMP.DTYPE"].startswith("Mixed precision")
    assert comments["SOLVER.BASE_LR"].startswith("The learning rate")
