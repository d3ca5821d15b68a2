"""What was asked for last is known, what was not for longest is forgotten."""

import pytest

from qwen21.recent import Recent


def test_the_last_ones_asked_for_are_known():
    made = []
    recent = Recent[str](2)

    def ask(key: str) -> str:
        return recent.get(key, lambda: made.append(key) or key.upper())

    assert [ask(key) for key in "abab"] == list("ABAB") and made == ["a", "b"]
    ask("c")  # a goes, since b was asked for after it
    assert [ask(key) for key in "bca"] == list("BCA") and made == ["a", "b", "c", "a"]


def test_what_fails_is_not_known():
    recent = Recent[int](2)
    with pytest.raises(ZeroDivisionError):
        recent.get("a", lambda: 1 // 0)
    assert recent.get("a", lambda: 2) == 2


def test_nothing_is_a_result_too():
    recent, made = Recent[None](2), []
    for _ in range(2):
        recent.get("a", lambda: made.append(1))
    assert made == [1]
