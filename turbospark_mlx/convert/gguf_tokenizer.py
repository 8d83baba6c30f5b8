"""Tokenizer side files from the metadata of a GGUF file.

GGUF stores a vocabulary, how its tokens merge, and the name of a rule that splits text before merging. llama.cpp is
the definition of what they mean; ``tokenizer.json`` says the same in the terms of the ``tokenizers`` library.

* ``tokenizer.ggml.model`` ``gpt2``: byte-level BPE. Its merges are listed; its splitting rule is named by
  ``tokenizer.ggml.pre``, one of ``PRE_TOKENIZERS``.
* ``llama``: SentencePiece BPE. Merges follow from the scores: of all adjacent pairs whose union is a token, the one
  with the highest score is merged first. What has no token becomes bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from turbospark_mlx.errors import ConvertError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Token types of ``tokenizer.ggml.token_type``."""

END_OF_TEXT_TOKENS = frozenset({"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"})
"""Control tokens that end an answer although a GGUF file has room to name only one or two of them."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging: ``splits`` apply one after the other, each to the pieces of the one before."""

    splits: tuple[str, ...]
    whole_words: bool = False
    """A piece that is a token by itself is taken whole, whatever the merges say."""
    adds_bos: bool = False
    """BOS is added unless the file says otherwise."""


_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),))

PRE_TOKENIZERS = {
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": PreTokenizer((_GPT2,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""Splitting rules by their name in ``tokenizer.ggml.pre``."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Side files with the same meaning as a GGUF file's ``tokenizer.*`` metadata.

    Returns ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json`` (the ids that end an answer) and,
    where the file has a template, ``chat_template.jinja``. Raises ConvertError naming the key that is missing, damaged,
    or not understood.
    """
    vocabulary = _Vocabulary.read(metadata)
    if vocabulary.model == "gpt2":
        name = _required(metadata, "pre", str)
        if name not in PRE_TOKENIZERS:
            raise ConvertError(
                f"tokenizer.ggml.pre is {name!r}, a way of splitting text that is not known here (known: "
                f"{', '.join(sorted(PRE_TOKENIZERS))}). Convert the model from its safetensors, which carry a "
                "tokenizer.json."
            )
        rule = PRE_TOKENIZERS[name]
        tokenizer = _byte_level(vocabulary, _merges(metadata, vocabulary), rule)
        adds_bos = rule.adds_bos
    elif vocabulary.model == "llama":
        tokenizer = _sentencepiece(vocabulary, metadata)
        adds_bos = True
    else:
        raise ConvertError(
            f"tokenizer.ggml.model is {vocabulary.model!r}; 'gpt2' and 'llama' are supported. Convert the model from "
            "its safetensors, which carry a tokenizer.json."
        )
    for id, (token, type) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if type in (UNKNOWN, CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=type != USER_DEFINED, normalized=False)])
            if tokenizer.token_to_id(token) != id:
                raise ConvertError(f"tokenizer.ggml.tokens[{id}] ({token!r}) does not keep its id.")
    bos, eos = vocabulary.special(metadata, "bos"), vocabulary.special(metadata, "eos")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _optional(metadata, "add_bos_token", bool, adds_bos) and bos is not None,
        "add_eos_token": _optional(metadata, "add_eos_token", bool, False) and eos is not None,
    }
    named = {"bos_token": bos, "eos_token": eos}
    named["unk_token"] = vocabulary.special(metadata, "unknown")
    named["pad_token"] = vocabulary.special(metadata, "padding")
    config |= {name: None if id is None else vocabulary.tokens[id] for name, id in named.items()}
    tokenizer.post_processor = _post_processor(vocabulary, config, bos, eos)
    files = {
        "tokenizer.json": tokenizer.to_str().encode("utf-8"),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json({"bos_token_id": bos, "eos_token_id": vocabulary.stop_ids(metadata)}),
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode("utf-8")
    return files


@dataclass(frozen=True)
class _Vocabulary:
    model: str
    tokens: list[str]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        # llama.cpp gives tokens without a text a name of their own, because two of them would be one token.
        stored = _required(metadata, "tokens", Sequence)
        tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(stored)]
        first: dict[str, int] = {}
        for id, token in enumerate(tokens):
            if not isinstance(token, str):
                raise ConvertError(f"tokenizer.ggml.tokens[{id}] is a {type(token).__name__}, not a text.")
            if first.setdefault(token, id) != id:
                raise ConvertError(
                    f"tokenizer.ggml.tokens has {token!r} twice, at {first[token]} and {id}; a text can have one id "
                    "only. Convert the model from its safetensors."
                )
        types = _optional(metadata, "token_type", Sequence, [NORMAL] * len(tokens))
        _check_numbers("token_type", types, len(tokens))
        return cls(_required(metadata, "model", str), tokens, types)

    def ids(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self.tokens)}

    def special(self, metadata: Mapping[str, Any], name: str) -> int | None:
        """The id under ``tokenizer.ggml.NAME_token_id``, checked."""
        id = _optional(metadata, f"{name}_token_id", int, None)
        if id is not None and not 0 <= id < len(self.tokens):
            raise ConvertError(f"tokenizer.ggml.{name}_token_id is {id}, but there are {len(self.tokens)} tokens.")
        return id

    def stop_ids(self, metadata: Mapping[str, Any]) -> list[int]:
        named = {self.special(metadata, name) for name in ("eos", "eot", "eom")}
        marks = {
            id for id, token in enumerate(self.tokens) if token in END_OF_TEXT_TOKENS and self.types[id] == CONTROL
        }
        return sorted((named | marks) - {None})


def _byte_level(vocabulary: _Vocabulary, merges: list[tuple[str, str]], rule: PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary.ids(), merges, ignore_merges=rule.whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    ids = vocabulary.ids()
    merges = []
    for index, merge in enumerate(_required(metadata, "merges", Sequence)):
        # The parts are joined by the first space that is not the first character.
        cut = merge.find(" ", 1) if isinstance(merge, str) else -1
        left, right = (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("", "")
        if left not in ids or right not in ids or left + right not in ids:
            raise ConvertError(
                f"tokenizer.ggml.merges[{index}] is {merge!r}, which does not join two tokens into a third. The file "
                "is damaged; fetch it again."
            )
        merges.append((left, right))
    return merges


def _sentencepiece(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    if "tokenizer.ggml.precompiled_charsmap" in metadata:
        raise ConvertError(
            "tokenizer.ggml.precompiled_charsmap, a table that rewrites text first, is not supported. Convert the "
            "model from its safetensors, which carry a tokenizer.json."
        )
    scores = _required(metadata, "scores", Sequence)
    _check_numbers("scores", scores, len(vocabulary.tokens))
    unknown = vocabulary.special(metadata, "unknown")
    if unknown is None:
        unknown = next((id for id, type in enumerate(vocabulary.types) if type == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids(),
            _merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # SentencePiece writes a space as U+2581, and one more before a text and after each special token.
    space = "\u2581"
    spaces: list[Any] = [normalizers.Replace(" ", space)]
    strip: list[Any] = []
    if _optional(metadata, "add_space_prefix", bool, True):
        spaces.insert(0, normalizers.Prepend(space))
        strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    ids = vocabulary.ids()
    found = []
    for token, id in ids.items():
        for cut in range(1, len(token)):
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids:
                found.append((-scores[id], id, cut, left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _post_processor(
    vocabulary: _Vocabulary, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> processors.PostProcessor | None:
    before, after = (bos if config["add_bos_token"] else None), (eos if config["add_eos_token"] else None)
    around = [(vocabulary.tokens[id], id) for id in (before, after) if id is not None]
    if not around:
        return None
    return processors.TemplateProcessing(
        single=[
            *([] if before is None else [vocabulary.tokens[before]]),
            "$A",
            *([] if after is None else [vocabulary.tokens[after]]),
        ],
        special_tokens=around,
    )


def _required(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    value = _optional(metadata, name, kind, None)
    if value is None:
        raise ConvertError(
            f"The GGUF file has no tokenizer.ggml.{name}, so its tokenizer cannot be built. Use a file made by a "
            "current converter, or convert the model from its safetensors."
        )
    return value


def _optional(metadata: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str)):
        raise ConvertError(
            f"tokenizer.ggml.{name} is a {type(value).__name__}, not a {kind.__name__.lower()}. The file is damaged; "
            "fetch it again."
        )
    return value


def _check_numbers(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise ConvertError(f"tokenizer.ggml.{name} has {len(values)} entries for {count} tokens.")
    for id, value in enumerate(values):
        if not isinstance(value, int | float) or not isfinite(value):
            raise ConvertError(f"tokenizer.ggml.{name}[{id}] is {value!r:.40}, not a number. Fetch the file again.")


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8")
