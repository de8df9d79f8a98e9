"""StopStrings against a plain search of the whole text, over all ways to cut it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tokenizer.tokenizer import StopStrings

SMALL = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def plain(text, stops, include):
    """The specification: at each character, in the listed order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def streamed(pieces, stops, include):
    found = StopStrings(stops, include)
    shown = []
    for piece in pieces:
        text, stop = found.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, found.finish()], None


def cuts(text):
    for places in itertools.product([False, True], repeat=max(len(text) - 1, 0)):
        starts = [0, *(index + 1 for index, cut in enumerate(places) if cut), len(text)]
        yield [text[i:j] for i, j in itertools.pairwise(starts)]


@settings(max_examples=300)
@given(SMALL, STOPS, st.booleans(), st.data())
def test_equals_the_plain_search(text, stops, include, data):
    """Guards against missed matches where stop strings overlap themselves or each other ("aab" in "aaab")."""
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in itertools.pairwise([0, *places, len(text)])]
    shown, stop = streamed(pieces, stops, include)
    assert ("".join(shown), stop) == plain(text, stops, include)


@settings(max_examples=200)
@given(SMALL, STOPS)
def test_holds_back_just_enough(text, stops):
    """Guards against a leaked beginning of a stop string, and against holding back more than may still become one."""
    found = StopStrings(stops)
    for end, char in enumerate(text, start=1):
        _, stop = found.push(char)
        if stop is not None:
            return
        ends = [text[start:end] for start in range(end + 1)]
        longest = max(len(part) for part in ends if any(other.startswith(part) for other in [*stops, ""]))
        assert len(found._held) == longest


@pytest.mark.covers("F11")
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", [["\n\n"], ["STOP"], ["</s>", "s>x"], ["abab", "ba"]])
def test_all_splits(stops, include):
    """Guards against a stop string found only when one token holds it whole."""
    for stop in stops:
        text = f"ab{stop}tail"
        expected = plain(text, stops, include)
        for pieces in cuts(text):
            shown, found = streamed(pieces, stops, include)
            assert ("".join(shown), found) == expected


def test_ties():
    """Complete first wins, then the order of the list: the contract that the docstring states."""
    assert streamed(["xabc"], ["abcd", "bc"], False) == (["xa"], "bc")
    assert streamed(["xabc"], ["c", "abc"], False) == (["xab"], "c")
    assert streamed(["xabc"], ["abc", "c"], False) == (["x"], "abc")


def test_matches_that_do_not_count():
    """Guards against min_tokens ending a text early, or losing the text of an ignored match."""
    found = StopStrings(["ab"])
    assert found.push("ab", may_stop=False) == ("", None)
    assert found.push("xa", may_stop=False) == ("abx", None)
    assert found.push("b") == ("", "ab")


def test_no_stops():
    """Guards against holding text back for nothing."""
    found = StopStrings([])
    assert found.push("text") == ("text", None)
    assert found.finish() == ""


class _Counting(str):
    """A stop string that counts how often it is compared."""

    compared = 0

    def startswith(self, *args):
        _Counting.compared += 1
        return super().startswith(*args)


def test_linear_time():
    """Guards against quadratic search for stop strings like "aaaa...". Counts comparisons, so it cannot flake."""
    stops = [_Counting("a" * length + "b") for length in range(240, 256)]
    found = StopStrings(stops)
    _Counting.compared = 0
    for _ in range(100):
        for _ in range(255):
            found.push("a")
        found.push("c")
    assert 0 < _Counting.compared < 3 * 100 * 256 * len(stops)
