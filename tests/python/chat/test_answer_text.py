"""Tests of an answer's text: stop words, the tokens of each text, incomplete characters."""

from __future__ import annotations

import codecs
from functools import cache

import pytest
from fake_engine import EOS, FakeTextStream
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from lmdeploy.chat.detokenize import TokenDetokenizer
from lmdeploy.chat.formats.text import TextDecoder
from lmdeploy.chat.stop_words import AnswerText, PlainAnswer, SpecialTokenStopFilter, StopMatcher
from lmdeploy.chat.tokenizer import Tokenizer, byte_alphabet

VOCAB_SIZE = 257  # the bytes, and a special token


@cache
def byte_tokenizer():
    backend = Backend(models.BPE(byte_alphabet(), []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = Tokenizer(backend, eos_ids=[])
    assert tokenizer.vocab_size == VOCAB_SIZE
    return tokenizer


class Pieces:
    """A detokenizer whose tokens are indices into a list of texts."""

    def __init__(self, texts):
        self.texts = texts

    pending = False

    def push(self, token):
        return self.texts[token]

    def finish(self):
        return ""


def run_pieces(texts, words, **options):
    answer = AnswerText(Pieces(texts), words, **options)
    shown, tokens = [], 0
    for token in range(len(texts)):
        answer.push(token)
        text, count = answer.take()
        shown.append(text)
        tokens += count
        if answer.stopped:
            break
    else:
        answer.finish()
        text, count = answer.take()
        shown.append(text)
        tokens += count
    return shown, tokens, answer.stopped


def splits(text):
    """Yield all ways to cut `text` into pieces."""
    for mask in range(1 << (len(text) - 1)):
        pieces, last = [], 0
        for i in range(1, len(text)):
            if mask >> (i - 1) & 1:
                pieces.append(text[last:i])
                last = i
        yield [*pieces, text[last:]]


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("abSTOPcd", ["STOP"], "ab"),
        ("aSTSTOPx", ["STOP"], "aST"),
        ("ababac!", ["abac"], "ab"),
        ("hello###", ["###", "#####"], "hello"),
        ("noSTOhere", ["STOP"], "noSTOhere"),
        ("xSTO", ["STOP"], "xSTO"),
        ("one\n\ntwo", ["\n\n"], "one"),
    ],
)
def test_answer_text_stop_word_is_found_at_every_split(text, words, expected):
    for pieces in splits(text):
        shown, _, stopped = run_pieces(pieces, words)
        assert "".join(shown) == expected, pieces
        assert stopped == (expected != text)
        # No chunk may show any part of a stop word.
        for i in range(len(shown)):
            assert expected.startswith("".join(shown[:i]))


def test_answer_text_token_count_matches_shown_text():
    shown, tokens, stopped = run_pieces(["ab", "cS", "TO", "Pd", "e"], ["STOP"])
    assert ("".join(shown), tokens, stopped) == ("abc", 2, True)
    shown, tokens, _ = run_pieces(["ab", "cS", "TO", "Pd"], ["STOP"], include_stop=True)
    assert ("".join(shown), tokens) == ("abcSTOP", 4)


def test_answer_text_stop_word_before_min_tokens_is_ignored():
    shown, _, stopped = run_pieces(["a", "STOP", "b", "STOP", "c"], ["STOP"], min_tokens=3)
    assert ("".join(shown), stopped) == ("aSTOPb", True)


def test_answer_text_stop_word_may_begin_before_min_tokens():
    shown, tokens, stopped = run_pieces(["a", "ST", "OP", "c"], ["STOP"], min_tokens=3)
    assert ("".join(shown), tokens, stopped) == ("a", 1, True)
    shown, _, stopped = run_pieces(["STOPST", "OP", "c"], ["STOP"], min_tokens=2)
    assert ("".join(shown), stopped) == ("STOP", True)
    words = ["\n\n", "\nUser:"]  # "\nUser:" begins inside "\n\n"
    shown, _, stopped = run_pieces(["Hi", "\n\n", "User", ":", "x"], words, min_tokens=3)
    assert ("".join(shown), stopped) == ("Hi\n", True)
    assert run_pieces(["a", "a", "a"], ["aa"], min_tokens=3)[2]


@given(
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 9),
)
def test_answer_text_min_tokens_equal_plain_search(texts, words, min_tokens):
    text = "".join(texts)
    counted = len("".join(texts[: max(min_tokens - 1, 0)]))  # stop words must end after this
    ends = [
        (i, -len(w))
        for i in range(counted + 1, len(text) + 1)
        for w in words
        if text[:i].endswith(w)
    ]
    shown, _, stopped = run_pieces(texts, words, min_tokens=min_tokens)
    end, length = min(ends, default=(len(text), 0))
    assert ("".join(shown), stopped) == (text[: end + length], bool(ends))


words_strategy = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.text("ab", max_size=20), words_strategy, st.data())
def test_stop_matcher_text_in_two_parts_equals_plain_search(text, words, data):
    matcher = StopMatcher(words)
    ends = [(i + 1, len(w)) for i in range(len(text)) for w in words if text[: i + 1].endswith(w)]
    expected = min(ends, key=lambda e: (e[0], -e[1])) if ends else None
    cut = data.draw(st.integers(0, len(text)))
    found = matcher.find(text[:cut])
    if found is None:
        held = matcher.held
        assert not any(text[:cut].endswith(w[:k]) for w in words for k in range(held + 1, len(w)))
        found = matcher.find(text[cut:])
        found = found and (found[0] + cut, found[1])
    assert found == expected


def test_answer_text_incomplete_characters_are_held_back():
    answer = AnswerText(FakeTextStream(True), ["é!"])
    shown = []
    for token in "né né!".encode():
        answer.push(token)
        shown.append(answer.take()[0])
    assert "".join(shown) == "né n"
    assert all("\ufffd" not in text for text in shown)


class Halves:
    """A detokenizer whose tokens are indices into a list of byte strings."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self):
        return bool(self.decoder.getstate()[0])

    def push(self, token):
        return self.decoder.decode(self.pieces[token])

    def finish(self):
        return self.decoder.decode(b"", True)


def test_answer_text_incomplete_stop_word_adds_no_tokens():
    answer = AnswerText(FakeTextStream(True), ["\N{SLIGHTLY SMILING FACE}"])
    tokens = []
    for token in "é\N{SLIGHTLY SMILING FACE}".encode():
        answer.push(token)
        tokens.append(answer.take()[1])
    assert answer.stopped
    assert tokens == [0, 2, 0, 0, 0, 0]
    broken = AnswerText(Halves([b"x\xf0\x9f", b"STOP"]), ["STOP"])
    for token in range(2):
        broken.push(token)
    assert broken.stopped and broken.take() == ("x\ufffd", 1)
    cut = AnswerText(FakeTextStream(True))
    for token in "é".encode()[:1]:
        cut.push(token)
    assert cut.take() == ("", 0)
    cut.finish()
    assert cut.take() == ("\ufffd", 1)


# The text of each token without and with special tokens.
SHOWN = ("a", "b", "ab", "ba", "")
WHOLE = (*SHOWN[:4], "<S>")


@given(
    st.lists(st.integers(0, 4), max_size=12),
    st.lists(st.lists(st.sampled_from(["a", "b", "<S>"]), min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_special_token_stop_filter_equals_plain_search(tokens, words, include_stop):
    words = ["".join(word) for word in words]
    plain = [word for word in words if "<S>" not in word]
    whole = "".join(WHOLE[token] for token in tokens)
    for word in plain:  # a match across a special token is found only in the text without it
        place = whole.find(word)
        alone = place if place < 0 else len(whole[:place].replace("<S>", ""))
        assume(whole.replace("<S>", "").find(word) == alone)
    gate = AnswerText(Pieces(WHOLE), words, include_stop=include_stop)
    answer = SpecialTokenStopFilter(Pieces(SHOWN), plain, gate=gate, include_stop=include_stop)
    shown, count = "", 0
    for token in tokens:
        answer.push(token)
        text, more = answer.take()
        shown, count = shown + text, count + more
        if answer.stopped:
            break
    else:
        answer.finish()
        text, more = answer.take()
        shown, count = shown + text, count + more
    ends = [(whole.find(word) + len(word), -len(word)) for word in words if word in whole]
    end, length = min(ends, default=(len(whole), 0))
    limit = end if include_stop else end + length
    begins = [len("".join(WHOLE[t] for t in tokens[:i])) for i in range(len(tokens))]
    assert shown == whole[:limit].replace("<S>", "")
    assert count == sum(begin < limit for begin in begins)
    assert answer.stopped == bool(ends)


class LatePieces(Pieces):
    """A detokenizer that returns all text at the end, as GPT-OSS does without its format."""

    def __init__(self, texts):
        super().__init__(texts)
        self.late = ""

    pending = False

    def push(self, token):
        self.late += super().push(token)
        return ""

    def finish(self):
        return self.late


@pytest.mark.parametrize("shown", [Pieces, LatePieces])
def test_special_token_stop_filter_ignores_stop_words_after_the_first_one(shown):
    gate = AnswerText(Pieces(WHOLE), ["a", "<S>b"], include_stop=True)
    answer = SpecialTokenStopFilter(shown(SHOWN), ["a"], gate=gate, include_stop=True)
    for token in (4, 3):  # <S>, ba
        answer.push(token)
    assert answer.stopped and answer.take() == ("b", 2)


def test_special_token_stop_filter_cut_in_a_dropped_token_keeps_the_text_before():
    gate = AnswerText(Pieces(WHOLE), ["b<"], include_stop=True)
    answer = SpecialTokenStopFilter(Pieces(SHOWN), gate=gate, include_stop=True)
    answer.push(2)  # ab
    answer.finish([4])
    assert answer.stopped and answer.take() == ("ab", 1)


@pytest.mark.parametrize("shown", [Pieces, LatePieces])
def test_special_token_stop_filter_cut_token_is_shown_up_to_the_cut(shown):
    answer = SpecialTokenStopFilter(shown(SHOWN), gate=AnswerText(Pieces(WHOLE), ["b<S>"]))
    for token in (0, 2, 4):  # a, ab, <S>
        answer.push(token)
    assert answer.stopped and answer.take() == ("aa", 2)


def test_special_token_stop_filter_hides_incomplete_character():
    gate = AnswerText(FakeTextStream(False), ["é<eos>"])
    answer = SpecialTokenStopFilter(FakeTextStream(True), gate=gate)
    for token in [*"né".encode(), EOS]:
        answer.push(token)
    assert answer.stopped and answer.take()[0] == "n"


@given(st.lists(st.integers(0, VOCAB_SIZE + 1), max_size=24), st.data())
def test_plain_answer_releases_the_text_and_tokens_that_answer_text_does(tokens, data):
    """Tokens are bytes, a special token and ids that only pad the vocabulary."""
    tokenizer = byte_tokenizer()

    def decoder():
        return TextDecoder(TokenDetokenizer(tokenizer, skip_special=True, begins_text=True))

    one_by_one = AnswerText(decoder())
    expected = []
    for token in tokens:
        one_by_one.push(token)
        expected.append(one_by_one.take())
    one_by_one.finish()
    rest = one_by_one.take()

    plain = PlainAnswer(decoder())
    done = 0
    while done < len(tokens):
        size = data.draw(st.integers(1, len(tokens) - done))
        assert plain.push_all(tokens[done : done + size]) == size
        parts = expected[done : done + size]
        assert plain.take() == ("".join(text for text, _ in parts), sum(n for _, n in parts))
        done += size
    plain.finish()
    assert plain.take() == rest
