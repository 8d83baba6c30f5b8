"""A runner and a tokenizer of a few lines each, whose answers can be worked out on paper."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from turbospark_mlx.errors import ContextError

VOCAB = 32


class ScriptedRunner:
    """Makes ``script[n]`` the most probable token n tokens after the prompt; a script entry may be a logits row.

    Keeps the Runner contract: ``history`` is what it was fed, prompts are run in chunks of 4, and reuse is the common
    prefix.
    """

    def __init__(self, script, max_context=64):
        self.script = list(script)
        self.max_context = max_context
        self.vocab_size = VOCAB
        self.history = []
        self.fed = []
        self.resets = 0
        self.closed = False
        self.backend = "host"
        self.tokenizer = Letters()
        self.model = SimpleNamespace(args=SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=max_context))

    def report(self):
        return SimpleNamespace(
            backend=self.backend,
            backend_reason="plain operations, because a compiler is missing",
            max_context=self.max_context,
            trained_context=self.model.args.max_position_embeddings,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def reuse(self, ids):
        common = 0
        while common < min(len(ids) - 1, len(self.history)) and ids[common] == self.history[common]:
            common += 1
        self.history = self.history[:common]
        return common

    def prefill(self, ids, *, progress=None, cancelled=None):
        done = 0
        while done < len(ids):
            if cancelled and cancelled():
                return None
            chunk = ids[done : done + 4]
            self._feed(chunk)
            done += len(chunk)
            if progress:
                progress(done, len(ids))
        self.prompt_end = len(self.history)
        return self._logits()

    def likeliest(self):
        return None

    def decode(self, token_id, *, ahead=False):
        self._feed([token_id])
        return self._logits()

    def reset(self):
        self.history = []
        self.resets += 1

    def close(self):
        self.closed = True

    def _feed(self, ids):
        if len(self.history) + len(ids) > self.max_context:
            raise ContextError("beyond max_context")
        self.history += ids
        self.fed.append(list(ids))

    def _logits(self):
        entry = self.script[len(self.history) - self.prompt_end]
        if isinstance(entry, BaseException):
            raise entry
        if not isinstance(entry, int):
            return mx.array(np.asarray(entry, dtype=np.float32))
        row = np.zeros(VOCAB, dtype=np.float32)
        row[entry] = 5.0
        return mx.array(row)


class Letters:
    """Token i is the i-th letter; BOS is 30, the stop ids are 31 and 29; 28 is a byte that is no text alone."""

    vocab = "abcdefghijklmnopqrstuvwxyz \n"
    bos_token_id = 30
    eos_token_ids = frozenset({31, 29})
    has_chat_template = True

    def encode(self, text, add_special_tokens=True):
        return [30] * add_special_tokens + [self.vocab.index(c) for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.vocab[i] if i < 28 else "\ufffd" if i == 28 else "" for i in ids)

    def id_to_token(self, token_id):
        return self.vocab[token_id] if token_id < 28 else {28: "half", 29: "<end>", 30: "<s>", 31: "</s>"}.get(token_id)

    def apply_chat_template(self, messages, *, add_generation_prompt=True, tokenize=True, **variables):
        text = "".join(f"{m['role'][0]} {m['content']}\n" for m in messages) + "a " * add_generation_prompt
        return self.encode(text) if tokenize else text
