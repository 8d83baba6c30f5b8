"""Harmony, gpt-oss's way to write a conversation: its prompt, and where an answer ends."""

import pytest

from tests.families.chat_tokenizers import byte_tokenizer

SPECIAL = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
TEMPLATE = """\
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' + effort }}
{{- '\\n\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
{{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {' }}
{%- for tool in tools %}{{- '\\ntype ' + tool.function.name + ' = () => any;' }}{%- endfor %}
{{- '\\n}<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
"""In the manner of the published template, which is much longer."""


def make(*, template=TEMPLATE, eos=200002, generation=(200002, 199999, 200012)):
    config = {"model_type": "gpt_oss", "eos_token_id": eos}
    named = {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    return byte_tokenizer(SPECIAL, template, config, named, generation)


@pytest.mark.parametrize("generation", [(200002, 199999, 200012), ()])
def test_return_and_call_stop_and_end_does_not(generation):
    """Also where generation_config.json is missing, as in many a quantized copy."""
    stops = make(generation=generation).eos_token_ids
    assert {200002, 200012} <= stops <= {200002, 200012, 199999}


def test_a_prompt_has_no_bos_and_special_tokens_are_one_id_each():
    tokenizer = make()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], reasoning_effort="low")
    assert ids[0] == 200006
    assert 199998 not in ids
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], reasoning_effort="low", tokenize=False)
    assert "Reasoning: low" in text
    assert text.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert tokenizer.decode(ids) == text
    assert ids.count(200007) == 2


def test_a_tool_is_called_and_answers():
    messages = [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
        },
        {"role": "tool", "name": "clock", "content": "12:00"},
    ]
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    text = make().apply_chat_template(messages, tools=tools, tokenize=False)
    assert "type clock = () => any;" in text
    assert (
        '<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{"zone": "UTC"}<|call|>'
        "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>12:00<|end|><|start|>assistant"
    ) in text
