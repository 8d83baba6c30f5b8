"""The streaming detokenizer: its pieces join to the decoding of all ids, for every kind of decoder pipeline."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from turbospark_mlx.generation.detokenizer import StreamingDetokenizer

CORPUS = [
    "Hello world, this is a test. 你好世界 שלום עולם 😀 👩‍👩‍👧 naïve café",
    "  leading  spaces\n\n\ttabs 12345 🏳️‍🌈 नमस्ते",
] * 10


class Decoding:
    """A tokenizers object behind the two methods that the detokenizer calls; counts the ids that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.id_to_token = tokenizer.id_to_token
        self.decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # "ï¿½" is U+FFFD in the byte alphabet: a finished character that looks like an unfinished one.
    special = ["<|end|>", "ï¿½"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback(decoder):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    # No emoji and no Devanagari: those are left to the byte tokens.
    tokenizer.train_from_iterator([text[:40] for text in CORPUS], trainer)
    tokenizer.decoder = decoder
    return tokenizer


SPACES = decoders.Replace("▁", " ")
PIPELINES = {
    "byte level": byte_level,
    "llama": lambda: byte_fallback(
        decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    ),
    "gemma": lambda: byte_fallback(decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()])),
    "metaspace": lambda: byte_fallback(decoders.Metaspace()),
    "metaspace and bytes": lambda: byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "wordpiece": lambda: byte_fallback(decoders.WordPiece(prefix="▁", cleanup=False)),
    "none": lambda: byte_fallback(None),
}


@pytest.fixture(params=PIPELINES, scope="module")
def tokenizer(request):
    built = PIPELINES[request.param]()
    if request.param == "none":
        built.decoder = None
    return Decoding(built)


def pieces(tokenizer, ids):
    detokenizer = StreamingDetokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def test_pieces_join_to_the_decoding_of_all_ids(tokenizer):
    rng = random.Random(0)
    vocab = tokenizer.tokenizer.get_vocab_size()
    names = [tokenizer.id_to_token(i) for i in range(vocab)]
    # Single bytes, lone spaces and ids that no token has are what the errors are made of.
    awkward = [i for i, name in enumerate(names) if len(name) == 1 or name.startswith("<0x")]
    awkward += [i for i, name in enumerate(names) if name in ("▁", "ï¿½")] * 5
    for trial in range(2000):
        share = rng.choice([0, 0.5, 0.9, 1])
        length = rng.randrange(60)
        ids = [rng.choice(awkward) if rng.random() < share else rng.randrange(vocab + 5) for _ in range(length)]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids), (trial, ids)


def test_real_text_comes_in_pieces_without_half_characters(tokenizer):
    for text in CORPUS[:2]:
        ids = tokenizer.tokenizer.encode(text).ids
        got = pieces(tokenizer, ids)
        assert "".join(got) == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in got)


def test_a_character_spread_over_tokens_comes_whole():
    for build, names in (
        (byte_level, ["ð", "Ł", "ĺ", "Ģ", "!"]),
        (PIPELINES["gemma"], ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "e"]),
    ):
        tokenizer = Decoding(build())
        ids = [tokenizer.tokenizer.token_to_id(name) for name in names]
        assert None not in ids
        got = pieces(tokenizer, ids)
        assert got[:3] == ["", "", ""]
        assert "".join(got[:5]) in ("😀!", "😀e")
        assert pieces(tokenizer, ids[:4])[:3] == ["", "", ""]
        assert "".join(pieces(tokenizer, ids[:4])) == "😀"
    # A byte-level character is certain with its last byte.
    tokenizer = Decoding(byte_level())
    ids = [tokenizer.tokenizer.token_to_id(name) for name in ["ð", "Ł", "ĺ", "Ģ"]]
    assert pieces(tokenizer, ids) == ["", "", "", "😀", ""]


def test_a_byte_run_is_text_only_as_a_whole():
    tokenizer = Decoding(PIPELINES["llama"]())
    # 'é' followed by a stray byte: the tokenizer gives one U+FFFD a byte, so 'é' must not have been shown.
    ids = [tokenizer.tokenizer.token_to_id(name) for name in ["<0xC3>", "<0xA9>", "<0xFF>", "a"]]
    assert pieces(tokenizer, ids) == ["", "", "", "\ufffd\ufffd\ufffda", ""]


def test_text_is_shown_as_soon_as_it_is_certain():
    tokenizer = Decoding(byte_level())
    ids = tokenizer.tokenizer.encode("Hello world").ids
    assert [p != "" for p in pieces(tokenizer, ids)] == [True] * len(ids) + [False]


def test_ids_without_a_token_give_no_text():
    tokenizer = Decoding(byte_level())
    beyond = tokenizer.tokenizer.get_vocab_size() + 100
    ids = tokenizer.tokenizer.encode("Hi there").ids
    assert "".join(pieces(tokenizer, [beyond, *ids, beyond])) == "Hi there"


@pytest.mark.parametrize("kind", ["words", "bytes", "spaces"])
def test_work_for_a_token_does_not_grow(tokenizer, kind):
    names = {"words": ["e", "o"], "bytes": ["¢", "<0xA2>", "ï¿½"], "spaces": ["▁", "Ġ"]}[kind]
    ids = [i for name in names if (i := tokenizer.tokenizer.token_to_id(name)) is not None]
    work = []
    for length in (500, 1000):
        tokenizer.decoded = 0
        assert "".join(pieces(tokenizer, ids * (length // len(ids)))) == tokenizer.tokenizer.decode(
            ids * (length // len(ids)), skip_special_tokens=False
        )
        work.append(tokenizer.decoded / length)
    assert work[1] < 1.2 * work[0] + 1
    assert work[1] < 100
