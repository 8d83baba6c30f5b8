"""Spark's way to write a conversation: a BOS a turn, a place for reasoning, and where an answer ends."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from turbospark_mlx.tokenizer import Tokenizer

SPECIAL = {
    "<\uff5cstart▁of▁sentence\uff5c>": 0,
    "<\uff5cend▁of▁sentence\uff5c>": 1,
    "<\uff5c▁pad▁\uff5c>": 2,
    "<think>": 3,
    "</think>": 4,
    "<|System|>": 130972,
    "<|User|>": 130973,
    "<|Tool|>": 130974,
    "<|Bot|>": 130976,
    "<tool_call>": 130977,
    "<arg_key>": 130980,
    "<arg_value>": 130982,
}
BOS, EOS = list(SPECIAL)[:2]
TEMPLATE = """\
{%- set ns = namespace(system='You are Spark.') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{%- set ns.system = ns.system + '\\n' + message.content %}{%- endif %}
{%- endfor %}
{{- bos_token + '<|System|>' + ns.system + eos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- bos_token + '<|User|>' + message.content + eos_token }}
{%- elif message.role == 'assistant' %}
{{- bos_token + '<|Bot|></think>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key><arg_value>' + value + '</arg_value>' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- elif message.role == 'tool' %}
{{- bos_token + '<|Tool|>' + message.content + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- bos_token + '<|Bot|>' + ('<think>' if enable_thinking | default(true) else '</think>') }}
{%- endif %}
"""
"""In the manner of the published template, which is longer."""


def make(*, generation=True):
    letters = {letter: 100 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE({**letters, **SPECIAL}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": "<\uff5c▁pad▁\uff5c>"}
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(named | {"add_bos_token": True}).encode(),
        "config.json": json.dumps({"model_type": "spark2_5", "bos_token_id": 0, "eos_token_id": 1}).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    if generation:
        files["generation_config.json"] = json.dumps({"eos_token_id": 1, "temperature": 1.0, "top_p": 0.95}).encode()
    return Tokenizer.from_files(files)


@pytest.mark.parametrize("generation", [True, False])
def test_one_token_stops(generation):
    assert make(generation=generation).eos_token_ids == {1}


@pytest.mark.parametrize(("thinking", "last"), [(None, 3), (True, 3), (False, 4)])
def test_a_prompt_ends_inside_or_outside_of_reasoning(thinking, last):
    """Each turn has the BOS that the template writes, and the tokenizer adds none before them."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tokenizer, options = make(), {} if thinking is None else {"enable_thinking": thinking}
    ids = tokenizer.apply_chat_template(messages, **options)
    assert ids[:2] == [0, 130972]
    assert ids[-3:] == [0, 130976, last]
    assert (ids.count(0), ids.count(1)) == (3, 2)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert text.startswith(f"{BOS}<|System|>You are Spark.\nBe brief.{EOS}{BOS}<|User|>Hi{EOS}{BOS}<|Bot|>")


def test_a_tool_is_called_and_answers():
    messages = [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
        },
        {"role": "tool", "content": "12:00"},
    ]
    text = make().apply_chat_template(messages, tokenize=False)
    assert (
        f"{BOS}<|Bot|></think><tool_call>clock<arg_key>zone</arg_key><arg_value>UTC</arg_value></tool_call>{EOS}"
        f"{BOS}<|Tool|>12:00{EOS}{BOS}<|Bot|><think>"
    ) in text
