"""Constraints: an automaton holds the texts of its expression, and canvases are the best and the right draws."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch

from blockdiff.data.tokenizer import byte_level_bpe, character_tokenizer
from blockdiff.errors import RequestError
from blockdiff.sampling.constraints import compile_child, outlines
from blockdiff.sampling.constraints import regex as expressions
from blockdiff.sampling.constraints.byte_automaton import texts_without
from blockdiff.sampling.constraints.compile_limit import compile_limit
from blockdiff.sampling.constraints.paths import completable, forced, paths
from blockdiff.sampling.constraints.regex import regex_automaton
from blockdiff.sampling.constraints.token_automaton import TokenAutomaton, token_automaton
from blockdiff.sampling.constraints.tokens import Tokens, token_bytes
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.random_regex import random_regex

pytestmark = pytest.mark.quick
EOS, EOS_2, PAD = 0, 1, 2
TEXTS = ["", "", "", "a", "b", "ab", "ba", "aab", "c", ""]  # three special ones, texts, and an id without a use
V = len(TEXTS)


def automaton_of(regex: str, eos=(EOS, EOS_2), pad: int | None = PAD, **options) -> TokenAutomaton:
    return token_automaton(regex_automaton(regex), Tokens([text.encode() for text in TEXTS], V), eos, pad, **options)


def said(tokens) -> str | None:
    """The text before the first eos; None if something else than eos and fill stands after it."""
    end = next((place for place, token in enumerate(tokens) if token in (EOS, EOS_2)), len(tokens))
    if any(token not in (EOS, EOS_2, PAD) for token in tokens[end:]) or any(not TEXTS[t] for t in tokens[:end]):
        return None
    return "".join(TEXTS[token] for token in tokens[:end])


def fits(regex: str, tokens) -> bool:
    text = said(tokens)
    return text is not None and re.fullmatch(regex, text) is not None


# -- texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "regex",
    ["a|ab", "a*?", "a+b?", "(a|b)*abb", "^a$", r"a\$", "(|a)b", "a{0}", "[^a]b?", "é|e", "(?:ab|a)(?:bc|c)?", "a??"],
)
def test_an_automaton_holds_the_texts_that_the_expression_matches_as_a_whole(regex):
    automaton = regex_automaton(regex)
    for length in range(5):
        for letters in itertools.product("abcé$", repeat=length):
            text = "".join(letters)
            assert automaton.accepts(text.encode()) == bool(re.fullmatch(regex, text)), text


def test_automata_of_random_expressions_agree_with_python(monkeypatch):
    monkeypatch.setattr(expressions, "call_outlines", lambda **asked: compile_child.answer(asked))  # no processes
    generator = random.Random(0)
    words = ["".join(letters) for length in range(6) for letters in itertools.product("ab", repeat=length)]
    for _ in range(150):
        regex = random_regex(generator, "ab")
        automaton, compiled = regex_automaton(regex), re.compile(regex)
        for word in words:
            assert automaton.accepts(word.encode()) == bool(compiled.fullmatch(word)), (regex, word)


def test_words_that_must_not_occur():
    automaton, both = texts_without((b"ab", b"bca")), regex_automaton("[abc]*c").both(texts_without((b"ab", b"bca")))
    for length in range(6):
        for letters in itertools.product("abc", repeat=length):
            text = "".join(letters)
            is_free = "ab" not in text and "bca" not in text
            assert automaton.accepts(text.encode()) == is_free
            assert both.accepts(text.encode()) == (is_free and text.endswith("c"))


@pytest.mark.parametrize(
    "regex,message",
    [
        ("ab[", r"character 2 \('\['\)"),
        (r"\p{L}[[:alpha:]](", r"missing \).*character 16 \('\('\)"),
        (")(", r"character 0 \('\)\('\)"),
        ("a)|(b", "parenthesis.*character 1"),
        ("a{2", r"repetition.*character 1 \('\{2'\)"),
        (r"\(?=(?=a)b", r"look-around.*character 4 \('\(\?=a\)b'\)"),
        (r"[(?=]+(a)\1", "back reference .*character 9"),
        (r"(?P<n>a)(?P=n)", "at character 8"),
        (r"\bfoo", r"word boundary.*character 0 \("),
        (r"a\p{Foo}", "at character 1"),
        ("a^b", "matches nothing|looks around"),
        ("b|^a", "its beginning"),
    ],
)
def test_what_is_no_usable_expression_is_refused_in_one_line(regex, message):
    with pytest.raises(RequestError, match=message) as caught:
        regex_automaton(regex)
    assert "\n" not in str(caught.value)


def test_languages_without_a_common_text_are_refused():
    with pytest.raises(RequestError, match="no text"):
        regex_automaton("a+").both(regex_automaton("b+"))


# -- tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("regex", ["a+b?", "(ab)*", "(a|b){3}c?", "b*(aab)?", "(?:a|ab)(?:c|ba)"])
def test_canvases_that_an_automaton_accepts_are_texts_of_the_expression_and_then_only_fill(regex):
    automaton = automaton_of(regex)
    for length in range(5):
        for tokens in itertools.product(range(V), repeat=length):
            state = automaton.run(tokens)
            assert bool(automaton.is_accepting_S[state]) == fits(regex, tokens), tokens


def test_an_eos_ends_the_text_for_good():
    automaton, a, b = automaton_of("a+b?"), 3, 4
    for tokens, is_accepted in {(a, EOS, EOS_2): True, (a, EOS, PAD, EOS): True, (a, EOS, a): False}.items():
        assert bool(automaton.is_accepting_S[automaton.run(tokens)]) is is_accepted
    assert automaton.run((a, EOS, b)) == automaton.run((PAD,)) == automaton.run((a, PAD)) == automaton.states


def test_tokens_that_an_automaton_treats_alike_are_one_class():
    automaton = automaton_of("[abc]*")
    assert automaton.next_SC.shape == (3, 3), "texts, eos and fill; the text, its end and the dead state"
    assert len({int(automaton.class_V[token]) for token in range(3, 9)}) == 1
    assert int(automaton.class_V[9]) == 3, "a token without a text has no class"


def test_automata_over_tokens_are_those_of_outlines_core_but_for_the_end():
    from outlines_core import Index, Vocabulary

    tokenizer = byte_level_bpe(['{"name": "Ann", "age": 31}', "a name, an age, and 12 more"] * 20, 330)
    texts = token_bytes(tokenizer)
    of_text: dict[bytes, list[int]] = {}
    for id, text in enumerate(texts):
        if text:
            of_text.setdefault(text, []).append(id)
    # An expression that none of its alternatives cuts short, which outlines-core would not follow to its end.
    regex = r'\{"name":[ ]?"[^"\\]{0,6}",[ ]?"age":[ ]?[0-9]{1,3}\}'
    index = Index(regex, Vocabulary(1, of_text))
    theirs, finals = index.get_transitions(), index.get_final_states()
    mine = token_automaton(regex_automaton(regex), Tokens(texts, len(texts)), [1], None)
    same = {index.get_initial_state(): 0}
    todo = list(same)
    for state in todo:
        own = {}
        for token, following in theirs[state].items():
            if token != 1:
                own[token] = following
        reached = {t: mine.run([t], same[state]) for t in range(len(texts)) if t != 1}
        assert own.keys() == {token for token, following in reached.items() if following != mine.states}
        assert (state in finals) == bool(mine.is_accepting_S[same[state]])
        for token, following in own.items():
            if following not in same:
                same[following] = reached[token]
                todo.append(following)
            assert same[following] == reached[token]
    assert len(same) == mine.states - 1


@pytest.mark.parametrize("make", [chat_tokenizer, lambda: byte_level_bpe(["héllo wörld, 日本 and more"] * 9, 300)])
def test_the_bytes_of_tokens_joined_are_the_decoded_text(make):
    tokenizer, generator = make(), random.Random(1)
    texts = token_bytes(tokenizer)
    usable = [id for id, text in enumerate(texts) if text]
    assert len(usable) > 200 and not any(texts[id] for id in tokenizer.all_special_ids)
    for _ in range(300):
        tokens = generator.choices(usable, k=generator.randint(1, 12))
        joined = b"".join(texts[token] for token in tokens).decode("utf-8", "replace")
        assert tokenizer.decode(tokens) == joined


def test_the_bytes_of_tokens_of_a_sentencepiece_vocabulary():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "<eos>", "<unk>", "▁a", "b", "▁", "<0xC3>", "<0xA9>", "é", "▁▁"]
    backend = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    assert token_bytes(tokenizer) == [b"", b"", b"", b" a", b"b", b" ", b"\xc3", b"\xa9", "é".encode(), b"  "]
    assert tokenizer.decode([3, 6, 7, 9, 4]) == " aé  b"
    backend.decoder = decoders.Metaspace()
    with pytest.raises(RequestError, match=r"\(Metaspace\)"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


def test_a_vocabulary_that_cannot_write_any_text_of_the_expression_is_refused():
    with pytest.raises(RequestError, match="no tokens"):
        automaton_of("xyz")


def test_the_empty_text_is_an_eos_and_without_one_it_cannot_be():
    automaton = automaton_of("")
    assert bool(automaton.is_accepting_S[automaton.run((EOS_2, PAD))]) and automaton.run((3,)) == automaton.states
    with pytest.raises(RequestError, match="empty text"):
        automaton_of("", eos=(), pad=None)


@pytest.mark.parametrize("regex", ["(?:a|b){5000}", "a{1,8000}", "x|((a{100}){10}){10}[^]{}]{2}", r"\{{5000}"])
def test_an_expression_of_long_texts_is_refused_before_anything_is_compiled(regex, monkeypatch):
    monkeypatch.setattr(expressions, "call_outlines", None)
    with pytest.raises(RequestError, match="counted repetitions"):
        regex_automaton(regex)


def test_an_expression_of_too_many_states_is_refused():
    for regex in ("(a|b)*a(a|b){12}", "(a|b)*a(a|b){15}"):  # over tokens, and over bytes already
        with pytest.raises(RequestError, match=r"states.*counted repetitions"):
            automaton_of(regex)


def test_compiling_ends_when_its_time_or_memory_does(monkeypatch):
    automaton, tokens = regex_automaton("a+b?"), Tokens([text.encode() for text in TEXTS], V)
    huge = "(a|b)*a(a|b){40}"  # 2 ** 41 states
    with (
        compile_limit(0.2),
        compile_limit(100),
        pytest.raises(RequestError, match=r"0\.2 seconds"),
    ):
        regex_automaton(huge)
    for part in (lambda: automaton.both(automaton), lambda: token_automaton(automaton, tokens, (EOS,), None)):
        with compile_limit(0.0), pytest.raises(RequestError, match="than 0 seconds"):
            part()
    monkeypatch.setattr(outlines, "COMPILE_BYTES", 64 << 20)
    with pytest.raises(RequestError, match="64 MiB"):
        regex_automaton(huge)


def test_a_compiler_that_fails_otherwise_is_not_said_to_lack_memory(monkeypatch, tmp_path):
    (tmp_path / "child.py").write_text("raise SystemError('it broke')")
    monkeypatch.setattr(compile_child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(RequestError, match=r"outlines-core.*SystemError: it broke"):
        regex_automaton("a[0-6]{3}b")


def test_texts_that_an_automaton_reads_alike_are_followed_once():
    words = [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
    tree = Tokens([word.encode() for word in [*words, "a-", "-a", "a"]], 67).read_by(regex_automaton("[a-z]{0,300}"))
    assert [len(byte) for _, byte in tree.levels] == [1, 1] and tree.leaf_N.unique().tolist() == [0, 1, 2]


# -- canvases ---------------------------------------------------------------------------------------------------


def one_position(z_LV: torch.Tensor, automaton: TokenAutomaton) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sums and maxima of the classes, [1, L, C]."""
    C = automaton.next_SC.shape[1]
    of_class = [z_LV[:, automaton.class_V == place] for place in range(C)]
    log_sum = torch.stack([z.logsumexp(-1) for z in of_class], -1)
    return log_sum[None], torch.stack([z.amax(-1) for z in of_class], -1)[None]


@pytest.mark.parametrize("seed", range(6))
def test_the_best_canvas_the_draws_and_the_marginals_are_those_of_all_canvases(seed):
    generator, L = random.Random(seed), 4
    regex = ["a+b?", "(a|b)*c", "(?:ab|a)(?:ba)?", "c?a{2,5}", "[ab]{3}", "(aab|b)+"][seed]
    automaton = automaton_of(regex)
    z = torch.randn(L, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    all_tokens = torch.tensor([t for t in itertools.product(range(V), repeat=L) if fits(regex, t)])
    weight = z[torch.arange(L), all_tokens].sum(-1)
    truth = weight.softmax(-1)

    n = 20_000
    log_sum, maximum = one_position(z, automaton)
    numbers = torch.rand(n, L, 2, generator=torch.Generator().manual_seed(generator.randrange(99)))
    final = automaton.is_accepting_S
    found = paths(automaton, log_sum, maximum, torch.tensor([0]), final[None], numbers[:1])
    best = all_tokens[weight.argmax()]
    assert found.best_BL[0].tolist() == automaton.class_V[best].tolist() and bool(found.is_possible_B)
    marginal = torch.zeros(L, V, dtype=torch.float64)
    for place in range(L):
        marginal[place].scatter_add_(0, all_tokens[:, place], truth)
    of_class = torch.zeros_like(log_sum[0]).index_add_(1, automaton.class_V[automaton.class_V < log_sum.shape[-1]],
                                                      marginal[:, automaton.class_V < log_sum.shape[-1]])  # fmt: skip
    torch.testing.assert_close(found.share_BLC[0], of_class, atol=1e-12, rtol=1e-9)

    # Draws: each canvas of classes as often as the distribution has it.
    drawn = paths(
        automaton, log_sum.expand(n, -1, -1), maximum.expand(n, -1, -1), torch.zeros(n, dtype=torch.int64),
        final.expand(n, -1), numbers,
    ).random_BL  # fmt: skip
    C = log_sum.shape[-1]
    key = (drawn * (C ** torch.arange(L))).sum(-1)
    keys = (automaton.class_V[all_tokens] * (C ** torch.arange(L))).sum(-1)
    expected = torch.zeros(C**L, dtype=torch.float64).index_add_(0, keys, truth)
    counted = key.bincount(minlength=C**L).double() / n
    assert float((counted - expected).abs().max()) < 0.012 and float(counted[expected == 0].sum()) == 0


def test_a_canvas_ends_only_where_the_remaining_tokens_can_finish_the_text():
    automaton = automaton_of("a{6}", eos=(EOS,), pad=None)
    a, aab = 3, 7
    assert automaton.run((aab,)) == automaton.states
    after = [automaton.run((a,) * count) for count in range(7)]
    for remaining in range(8):
        is_open = completable(automaton, remaining)[-1]
        assert [bool(is_open[state]) for state in after] == [6 - count <= remaining for count in range(7)]
    without_eos = automaton_of("a{2}|a{5}", eos=(), pad=None)
    is_open = [bool(completable(without_eos, remaining)[-1, 0]) for remaining in range(7)]
    assert is_open == [False, False, True, False, False, True, False], "with no eos the text fills its tokens exactly"


@pytest.mark.parametrize("regex", ["ab?c", "(?:ab){2}", "[ab]c[ab]", "aabc?", "a*", "c{4}"])
@pytest.mark.parametrize("pins", [(-1, -1, -1, -1), (-1, 8, -1, -1)])
def test_what_a_constraint_leaves_no_choice_of_is_found(regex, pins):
    automaton = automaton_of(regex, eos=(EOS,), pad=None)
    canvases = [
        tokens for tokens in itertools.product(range(V), repeat=4)
        if bool(automaton.is_accepting_S[automaton.run(tokens)])
        and all(pin in (-1, token) for pin, token in zip(pins, tokens, strict=True))
    ]  # fmt: skip
    if canvases:
        every = [{tokens[place] for tokens in canvases} for place in range(4)]
        truth = [each.copy().pop() if len(each) == 1 else -1 for each in every]
        anywhere = torch.zeros(4, dtype=torch.bool)
        assert forced(automaton, 0, automaton.is_accepting_S, torch.tensor(pins), anywhere).tolist() == truth


def test_the_holes_of_a_template_have_no_end_in_them_and_so_may_leave_no_choice():
    automaton, free = automaton_of("ac|acc", eos=(EOS,), pad=None), torch.full((3,), -1)
    for is_text, expected in (([False] * 3, [3, 8, -1]), ([True] * 3, [3, 8, 8])):
        assert forced(automaton, 0, automaton.is_accepting_S, free, torch.tensor(is_text)).tolist() == expected


def test_an_eos_that_is_banned_or_of_another_vocabulary_ends_no_text():
    automaton = automaton_of("a{1,3}", eos=(EOS, EOS_2, V + 5), banned=(EOS,))
    assert not bool(automaton.is_accepting_S[automaton.run((3, EOS))])
    assert bool(automaton.is_accepting_S[automaton.run((3, EOS_2))])
    assert bool(automaton.is_accepting_S[automaton.run((3, 3, 3))])


def test_a_long_and_wide_canvas_stays_exact(monkeypatch):
    """Chunks of positions and rows change nothing, and logits of any size neither overflow nor vanish."""
    from blockdiff.sampling.constraints import paths as module

    automaton = automaton_of("(?:aab|b|c){0,200}")
    g = torch.Generator().manual_seed(0)
    z = torch.randn(3, 64, V, generator=g, dtype=torch.float64) * 400
    log_sum, maximum = (torch.cat(each) for each in zip(*(one_position(row, automaton) for row in z), strict=True))
    numbers = torch.rand(3, 64, 2, generator=g)
    arguments = (log_sum, maximum, torch.tensor([0, 1, 0]), automaton.is_accepting_S.expand(3, -1), numbers)
    whole = paths(automaton, *arguments)
    monkeypatch.setattr(module, "NUMBERS", 10_000)
    for one, other in zip(whole, paths(automaton, *arguments), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(whole.share_BLC.sum(-1), torch.ones(3, 64, dtype=torch.float64))
    assert bool(whole.is_possible_B.all())


def test_character_tokenizers_have_their_characters_as_texts():
    texts = token_bytes(character_tokenizer(".=123é"))
    assert texts == [b"", b"", b"", *(character.encode() for character in ".=123é")]
