"""Text from token ids, one id at a time, such that the pieces join to what decoding all ids at once gives.

A tokenizer decodes a sequence, not a token: the first token loses its leading space, a character may be spread over
several tokens, and a run of byte tokens (``<0xE2>``) is text only if the whole run is valid UTF-8. So each piece is
decoded behind the token before it, and text that later tokens could still change is held back: a run of byte tokens
until it ends, and a last U+FFFD, which stands for an unfinished character. The work for a token does not depend on how
many came before.

What the tokenizer's vocabulary and its decoder pipeline look like is not known here.
"""

from __future__ import annotations

import re
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# A character has at most four bytes, so of four tokens that came last at least one begins after all that is settled.
LOOKAHEAD = 4
LONG = 4 * LOOKAHEAD


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, ids: list[int]) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class StreamingDetokenizer:
    """Decodes a stream of token ids.

    Ids that the tokenizer does not have give no text: a model's head may have more rows than its tokenizer has tokens.
    """

    def __init__(self, tokenizer: Decoder):
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add one id and return the text that has become certain; often one token's, sometimes none."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        if BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._pending_text()
        certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._shown : certain]
        self._shown = certain
        if certain == len(text):
            # An empty token alone would let the next one count as the first of the text.
            self._start_after([token_id] if token else [*self._context, token_id])
        elif len(self._pending) >= LONG:
            self._shorten()
        return piece

    def finish(self) -> str:
        """The stream is complete: return what was held back."""
        return self._pending_text()[self._shown :]

    def _pending_text(self):
        return self._tokenizer.decode(self._context + self._pending)[len(self._context_text) :]

    def _start_after(self, context):
        self._context, self._context_text = context, self._tokenizer.decode(context)
        self._pending, self._shown = [], 0

    def _shorten(self):
        """Bound the work in a long run of invalid bytes: its front becomes the context of the rest.

        The front may end inside a character, since it decodes to one U+FFFD for every character that begins in it.
        """
        front, rest = self._pending[:-LOOKAHEAD], self._pending[-LOOKAHEAD:]
        shown = self._shown + len(self._context_text) - len(self._tokenizer.decode(self._context + front))
        self._start_after(front)
        self._pending, self._shown = rest, shown
