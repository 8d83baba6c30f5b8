"""Stop strings across pieces of text."""

import random

import pytest

from turbospark_mlx.errors import OptionError
from turbospark_mlx.generation.stopping import StopMatcher, stop_strings


def run(strings, pieces):
    """What is shown after each piece, what the end adds, and whether a stop string matched."""
    matcher = StopMatcher(strings)
    return [matcher.push(piece) for piece in pieces], matcher.finish(), matcher.matched


@pytest.mark.parametrize(
    ("strings", "pieces", "shown", "tail", "matched"),
    [
        (["STOP"], ["one ST", "OP two", " three"], ["one ", "", ""], "", True),
        (["STOP"], ["one ST", "AY"], ["one ", "STAY"], "", False),
        (["STOP"], ["one ST"], ["one "], "ST", False),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "", True),
        (["ab", "abc"], ["x", "abc"], ["x", ""], "", True),
        (["abc", "abd"], ["ab", "ab", "d"], ["", "ab", ""], "", True),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "", True),
        (["end"], ["end of it"], [""], "", True),
        ([], ["anything", "<at all>"], ["anything", "<at all>"], "", False),
    ],
)
def test_by_hand(strings, pieces, shown, tail, matched):
    assert run(strings, pieces) == (shown, tail, matched)


def test_the_stop_string_completed_first_wins_and_of_several_the_longest():
    assert run(["bcd", "c"], ["abcd"])[0] == ["ab"]
    assert run(["bcd", "cd"], ["abcd"])[0] == ["a"]


def test_the_visible_text_does_not_depend_on_the_borders():
    rng = random.Random(1)
    matches = 0
    for _ in range(2000):
        strings = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 25)))
        # Definition: the first character that completes a stop string ends the text before the longest it completes.
        expected = text
        for end in range(1, len(text) + 1):
            if completed := [s for s in strings if text[:end].endswith(s)]:
                expected = text[: end - max(map(len, completed))]
                matches += 1
                break
        pieces, rest = [], text
        while rest:
            cut = rng.randint(0, 4)
            pieces.append(rest[:cut])
            rest = rest[cut:]
        shown, tail, matched = run(strings, pieces)
        assert "".join(shown) + tail == expected, (strings, pieces)
        assert matched == (expected != text)
    assert matches > 500


def test_only_a_possible_beginning_is_held_back():
    rng = random.Random(2)
    for _ in range(500):
        strings = ["".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(rng.randint(1, 3))]
        matcher, text, shown = StopMatcher(strings), "", ""
        for _ in range(12):
            piece = "".join(rng.choices("abc", k=rng.randint(0, 3)))
            text += piece
            shown += matcher.push(piece)
            if matcher.matched:
                break
            held = text[len(shown) :]
            assert not held or any(s.startswith(held) for s in strings)
            longer = [text[i:] for i in range(len(shown)) if any(s.startswith(text[i:]) for s in strings)]
            assert not longer  # nothing that could become a stop string was shown


def test_what_counts_as_stop_strings():
    assert stop_strings(None) == ()
    assert stop_strings("END") == ("END",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    for bad in ("", ["a", ""], [None], [3]):
        with pytest.raises(OptionError, match="stop"):
            stop_strings(bad)
