"""Text to token ids and back, with the chat template and every id that ends an answer.

The rules that this module fixes, because models disagree about where things are said:

* The chat template is looked for in ``chat_template.jinja``, then ``chat_template.json``, then the key
  ``chat_template`` of ``tokenizer_config.json`` (one text, or a list of named ones: ``tool_use`` when tools are given,
  otherwise ``default``).
* A prompt begins with exactly one BOS if the tokenizer adds one: ``add_bos_token`` of ``tokenizer_config.json`` decides
  where it is given, otherwise the post-processor of ``tokenizer.json``. Text that already begins with it, as most
  rendered templates do, gets no second one.
* An answer ends at any id that any file names: ``eos_token_id`` of ``generation_config.json`` and ``config.json``,
  ``eos_token`` of ``tokenizer_config.json``, and the token that closes a turn in the chat template.

Knows nothing of models: a model's head may have more rows than there are tokens here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import tokenizers

from turbospark_mlx.chat_template import ChatTemplate
from turbospark_mlx.errors import InstallError, OptionError

SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)

# fmt: off
TURN_END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<|end_of_turn|>", "<|return|>",
    "<|call|>",
)
# fmt: on
"""Tokens that hand over from the assistant wherever a chat template writes them. ``<|end|>`` is not one: some models
close a thought with it and go on."""

_ID = re.compile(r"[0-9]{1,10}")

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _Install(Protocol):
    def read_side_file(self, name: str, default: Any = ...) -> Any: ...


class Tokenizer:
    """The tokenizer of one model.

    Build it with :meth:`from_install` or :meth:`from_files`. Instances are not changed after that and may be shared
    by threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: Mapping[str, bytes]) -> None:
        # A tokenizer.json saved from a training script may cut or pad every text it is given.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._config = _json_object(files, "tokenizer_config.json")
        self._generation_config = _json_object(files, "generation_config.json")
        self._model_config = _json_object(files, "config.json")
        self._template_origin, self._template_sources = _find_chat_templates(files, self._config)
        self._compiled: dict[str, ChatTemplate] = {}
        self.has_chat_template = bool(self._template_sources)
        self.special_tokens = self._named_tokens()
        """``bos_token`` and its kin -> text, as chat templates see them."""
        self._add_missing_tokens()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        """Ids of the tokens that are marks, not text."""
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = self._id_of("bos_token")
        self._prefix, self._suffix = self._added_around_text()
        self.eos_token_ids = self._stop_ids()
        """Every id that ends an answer."""

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """A tokenizer from side files, name -> content.

        ``tokenizer.json`` is needed, the others of ``SIDE_FILES`` are used where present. Raises InstallError naming
        the file that is missing or damaged.
        """
        content = files.get("tokenizer.json")
        if content is None:
            raise InstallError(
                "tokenizer.json is missing, so text cannot be turned into tokens. Convert the model again from a "
                "checkpoint that has it."
            )
        return cls(_parse_backend(content), files)

    @classmethod
    def from_install(cls, install: _Install) -> Tokenizer:
        """The tokenizer of an opened install, from its side files."""
        found = {name: install.read_side_file(name, default=None) for name in SIDE_FILES}
        return cls.from_files({name: content for name, content in found.items() if content is not None})

    # Text and ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        With ``add_special_tokens`` the ids begin with BOS where this tokenizer adds one, and never with two.
        Special tokens written out in the text become their ids. Raises OptionError for text that is not Unicode, and
        InstallError where the tokenizer fails on it.
        """
        if not isinstance(text, str):
            raise OptionError(f"text is a {type(text).__name__}, not a str.")
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise OptionError(f"The text holds a lone surrogate, which no character set can write: {error}") from error
        except BaseException as error:
            raise _failure(error, "does not encode this text") from error
        if not add_special_tokens:
            return ids
        return [*self._missing_prefix(ids), *ids, *self._suffix]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Ids without a token, which a padded head can produce, add nothing."""
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)

    def id_to_token(self, id: int) -> str | None:
        """The vocabulary's spelling of a token, or None where there is none."""
        return self._backend.id_to_token(id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling, or None."""
        return self._backend.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Every token -> its id, special and other added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token."""
        return max(self.get_vocab().values(), default=-1) + 1

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The one id to use where only one can be: the tokenizer's own, else the smallest of ``eos_token_ids``."""
        own = self._id_of("eos_token")
        return own if own is not None else min(self.eos_token_ids, default=None)

    # Chat

    @property
    def chat_template(self) -> str | None:
        """The source of the template that a conversation without tools is rendered with."""
        return self._template_sources.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """The prompt for a conversation: token ids, or with ``tokenize=False`` its text.

        ``messages`` are ``{"role": ..., "content": ...}`` dictionaries, ``tools`` JSON schemas, ``variables`` whatever
        else the template reads (``enable_thinking=False``). ``continue_final_message`` leaves the last message open,
        for the model to go on with it. Ids begin with exactly one BOS where this tokenizer adds one. Raises
        OptionError when the model has no template, or with the template's own message when it does not accept the
        conversation.
        """
        if not self.has_chat_template:
            raise OptionError(
                "This model has no chat template (chat_template.jinja, chat_template.json and the key chat_template of "
                "tokenizer_config.json are all absent), so it cannot chat. Give it plain text to complete instead."
            )
        text = self._template("tool_use" if tools and "tool_use" in self._template_sources else "default").render(
            messages,
            **{**self.special_tokens, "tools": tools, "documents": None, **variables},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return [*self._missing_prefix(ids), *ids]

    # How the files are read

    def _missing_prefix(self, ids: list[int]) -> list[int]:
        return [] if ids[: len(self._prefix)] == self._prefix else self._prefix

    def _template(self, name: str) -> ChatTemplate:
        # Compiled when first used: a broken template must not keep a model from completing plain text.
        if name not in self._template_sources:
            raise InstallError(
                f"{self._template_origin} has chat templates named {sorted(self._template_sources)} but none named "
                f"{name!r}. Rename the one to use."
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._template_sources[name], self._template_origin)
        return self._compiled[name]

    def _add_missing_tokens(self) -> None:
        """Add the tokens that only tokenizer_config.json declares, so that text keeps them whole."""
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        listed = self._config.get("added_tokens_decoder")
        declared = (
            [(int(id), entry) for id, entry in listed.items() if _ID.fullmatch(id)] if isinstance(listed, dict) else []
        )
        named = [(None, {"content": text, "special": True}) for text in self.special_tokens.values()]
        for id, entry in [*sorted(declared, key=lambda item: item[0]), *named]:
            content = entry.get("content") if isinstance(entry, dict) else None
            if not isinstance(content, str) or content in known:
                continue
            # A new token gets the next free id; any other than the declared one may not exist in the model's head.
            if self.token_to_id(content) is None and id != self._backend.get_vocab_size():
                continue
            flags = {name: bool(entry.get(name)) for name in ("special", "lstrip", "rstrip", "single_word")}
            self._backend.add_tokens([tokenizers.AddedToken(content, normalized=False, **flags)])
            known.add(content)

    def _named_tokens(self) -> dict[str, str]:
        named = {}
        for name in _NAMED_TOKENS:
            if name in self._config:
                value = self._config[name]
                # Written by transformers as a text, as a dictionary of the token's flags, or as null for none.
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    named[name] = text
                continue
            for config in (self._generation_config, self._model_config):
                token = self.id_to_token(id) if _is_id(id := config.get(f"{name}_id")) else None
                if token is not None:
                    named[name] = token
                    break
        return named

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_to_id(text)

    def _added_around_text(self) -> tuple[list[int], list[int]]:
        """What ``encode`` puts before and after a text."""
        if isinstance(self._config.get("add_bos_token"), bool) or isinstance(self._config.get("add_eos_token"), bool):
            bos, eos = self.bos_token_id, self._id_of("eos_token")
            return (
                [bos] if self._config.get("add_bos_token") and bos is not None else [],
                [eos] if self._config.get("add_eos_token") and eos is not None else [],
            )
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        start = next(i for i in range(len(full) + 1) if full[i : i + len(bare)] == bare)
        return full[:start], full[start + len(bare) :]

    def _stop_ids(self) -> frozenset[int]:
        stops = set()
        text_config = self._model_config.get("text_config")
        for config in (self._generation_config, self._model_config, text_config):
            value = config.get("eos_token_id") if isinstance(config, dict) else None
            stops.update(id for id in (value if isinstance(value, list) else [value]) if _is_id(id))
        named = [self._id_of("eos_token")]
        for token in TURN_END_TOKENS:
            if any(token in source for source in self._template_sources.values()):
                named.append(self.token_to_id(token))
        stops.update(id for id in named if id is not None and (id in self.special_ids or id == named[0]))
        return frozenset(stops)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _parse_backend(content: bytes) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        # Some faults show only in use.
        backend.decode(backend.encode("a").ids)
        return backend
    except BaseException as error:
        raise _failure(error, "cannot be read") from error


def _failure(error: BaseException, what: str) -> BaseException:
    """What to raise for a failure of the tokenizers library. A damaged file can make it panic: no Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return InstallError(f"tokenizer.json {what}: {error}. Fetch or convert the model again.")


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    content = files.get(name)
    if content is None:
        return {}
    try:
        value = json.loads(content.decode("utf-8"))
        # JSON can spell half a surrogate pair, which is no text.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise InstallError(f"{name} is not JSON: {error}. Fetch or convert the model again.") from error
    if not isinstance(value, dict):
        raise InstallError(f"{name} holds a {type(value).__name__}, not an object. Fetch or convert the model again.")
    return value


def _find_chat_templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The file that has the chat template, and name -> source; no names where no file has one."""
    if (origin := "chat_template.jinja") in files:
        try:
            found: Any = files[origin].decode("utf-8")
        except UnicodeDecodeError as error:
            raise InstallError(f"{origin} is not UTF-8: {error}. Fetch or convert the model again.") from error
    elif (origin := "chat_template.json") in files:
        found = _json_object(files, origin).get("chat_template")
    else:
        origin = "tokenizer_config.json"
        found = config.get("chat_template")
    if found is None:
        return origin, {}
    if isinstance(found, str):
        return origin, {"default": found}
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        named = {entry.get("name"): entry.get("template") for entry in found}
        if all(isinstance(text, str) for text in (*named.keys(), *named.values())):
            return origin, named
    raise InstallError(f"{origin}: chat_template is neither a text nor a list of named texts. Fetch the model again.")
