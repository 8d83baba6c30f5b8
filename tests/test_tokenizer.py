"""Chat templates against transformers, and the rules about BOS, stop ids and where things are looked for."""

import json

import pytest
import tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from turbospark_mlx import chat_template
from turbospark_mlx.chat_template import ChatTemplate
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.tokenizer import Tokenizer

from .chat_templates import CHATML, CONVERSATIONS, INST, TEMPLATES, TOOLS

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|start_header_id|>"]
BOS, EOS, IM_START, IM_END, EOT, END = range(6)


def backend(*, adds_bos=False, special=SPECIAL):
    """Byte-level, without merges: every byte is a token, after the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE({token: id for id, token in enumerate([*special, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in special])
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return made


def files(config=None, /, *, template=None, adds_bos=False, **more):
    """Side files; keyword arguments name JSON files by their stem."""
    config = {"bos_token": "<s>", "eos_token": "</s>", **(config or {})}
    made = {"tokenizer.json": backend(adds_bos=adds_bos).to_str().encode()}
    made["tokenizer_config.json"] = json.dumps(config).encode()
    if template is not None:
        made["chat_template.jinja"] = template.encode()
    return made | {f"{name}.json": json.dumps(value).encode() for name, value in more.items()}


def make(config=None, /, **options):
    return Tokenizer.from_files(files(config, **options))


def theirs(tmp_path, made):
    transformers = pytest.importorskip("transformers")
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


USER = [{"role": "user", "content": "hi"}]


# Templates


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(template, tmp_path):
    made = files({"tokenizer_class": "PreTrainedTokenizerFast"}, template=TEMPLATES[template])
    ours, reference = Tokenizer.from_files(made), theirs(tmp_path, made)
    compared = 0
    for name, messages in CONVERSATIONS.items():
        for options in (
            {},
            {"add_generation_prompt": False},
            {"tools": TOOLS},
            {"enable_thinking": False, "date_string": "1 May 2026"},
        ):
            options = {"add_generation_prompt": True, **options}
            try:
                expected = reference.apply_chat_template(messages, tokenize=False, **options)
            except Exception:
                with pytest.raises(OptionError):
                    ours.apply_chat_template(messages, **options)
                continue
            assert ours.apply_chat_template(messages, tokenize=False, **options) == expected, (name, options)
            ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            assert ours.apply_chat_template(messages, **options) == ids, (name, options)
            compared += 1
    assert compared >= 8


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen"])
@pytest.mark.parametrize("content", ["Sure, ", "Sure,", " \nSure"])
def test_a_message_can_be_continued(template, content, tmp_path):
    made = files(template=TEMPLATES[template])
    messages = [*USER, {"role": "assistant", "content": content}]
    options = {"tokenize": False, "continue_final_message": True, "add_generation_prompt": False}
    expected = theirs(tmp_path, made).apply_chat_template(messages, **options)
    assert Tokenizer.from_files(made).apply_chat_template(messages, **options) == expected


def test_strftime_now_is_today():
    from datetime import datetime

    before = datetime.now().strftime("%d %B %Y")
    text = make(template="{{ strftime_now('%d %B %Y') }}").apply_chat_template(USER, tokenize=False)
    assert text in (before, datetime.now().strftime("%d %B %Y"))


def test_a_refusing_template_is_quoted():
    tokenizer = make(template=INST)
    with pytest.raises(OptionError, match="must alternate user/assistant"):
        tokenizer.apply_chat_template(CONVERSATIONS["twice"])
    with pytest.raises(OptionError, match="must alternate"):
        tokenizer.apply_chat_template(CONVERSATIONS["system"])


def test_a_trailing_newline_in_the_content_stays():
    text = make(template=CHATML).apply_chat_template([{"role": "user", "content": "hi\n"}], tokenize=False)
    assert "user\nhi\n<|im_end|>\n" in text


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("hello", "a list of dictionaries"),
        ({"role": "user"}, "a list of dictionaries"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"role": "user", "content": object()}], r"messages\[0\] holds a object"),
    ],
)
def test_messages_that_are_none_are_refused(messages, named):
    with pytest.raises(OptionError, match=named):
        make(template=CHATML).apply_chat_template(messages)


def test_templates_see_no_objects():
    class Text(str):
        def leak(self):
            return "leaked"

    text = make(template="{{ messages[0].content.leak is defined }}").apply_chat_template(
        [{"role": "user", "content": Text("x")}], tokenize=False
    )
    assert text == "False"
    with pytest.raises(OptionError, match="function"):
        make(template="x").apply_chat_template(USER, hook=lambda: None)


# Hostile templates: the sandbox of jinja alone lets each of these fill the memory or run for ever

GROW = "{% set ns = namespace(x='aaaaaaaa', l=[1]) %}{% for i in range(64) %}"
BOMBS = [
    "{{ range(10**9) | list }}",
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ (10 ** 1000) ** 10 % 7 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    GROW + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    GROW + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    GROW + "{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l | tojson }}",
    GROW + "{% set ns.l = {1: ns.l, 2: ns.l} %}{% endfor %}{{ ns.l }}",
    GROW + "{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l | length }}",
    "{{ ([range(9999) | list] * 99999) | sum(start=[]) | length }}",
    "{{ ('a' * 30000000) | list | sort | length }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a\n' * 999999 | indent('b' * 999999) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ [1] | batch(1000000000, 1) | list }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
    "{{ ('a' * 999999).join(range(99999) | map('string') | list) }}",
    "{{ range(99999) | join('a' * 999999) }}",
    "{{ messages[0].content.translate({104: 'b' * 999999}) }}",
    "{{ lipsum(10**9) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_hostile_templates_are_stopped(template, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.5)
    tokenizer = make(template=template)
    with pytest.raises(OptionError, match="chat template"):
        tokenizer.apply_chat_template(USER, tokenize=False)


@pytest.mark.parametrize("form", ["[ns.x, ns.x]", "(ns.x, ns.x)", "{1: ns.x, 2: ns.x}"])
def test_structures_that_hold_themselves_in_halves_are_paid_for(form):
    """Small in memory, endless to compare."""
    grow = "".join(f"{{% set ns.{name} = {form.replace('x', name)} %}}" for name in "ab")
    source = (
        f"{{% set ns = namespace(a=[1], b=[1]) %}}{{% for i in range(27) %}}{grow}{{% endfor %}}{{{{ ns.a == ns.b }}}}"
    )
    with pytest.raises(OptionError, match="characters of text"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize("use", ["ns.a == ns.b", "ns.a is eq(ns.b)", "ns.a in [ns.b]", "[ns.a, ns.b] | unique | list"])
def test_arguments_that_hold_themselves_in_halves_are_paid_for(use):
    """A macro's ``varargs`` are a tuple that no display made."""
    grow = "{% macro grow(n, to) %}{% if n %}{{ grow(n - 1, to, varargs, varargs) }}{% elif to == 'a' %}"
    grow += "{% set ns.a = varargs %}{% else %}{% set ns.b = varargs %}{% endif %}{% endmacro %}"
    source = "{% set ns = namespace() %}" + grow + "{{ grow(64, 'a', 1) }}{{ grow(64, 'b', 1) }}{{ " + use + " }}"
    with pytest.raises(OptionError, match="characters of text"):
        ChatTemplate(source).render(USER)


def test_a_namespace_does_not_spell_out_what_it_holds():
    """Otherwise this one's text would have 2 ** 64 parts."""
    source = GROW + "{% set ns.l = namespace(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}"
    assert ChatTemplate(source).render(USER) == "<Namespace>"


def test_time_is_limited(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.1)
    template = ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(OptionError, match=r"takes more than 0\.1 seconds"):
        template.render(USER)


def test_a_long_conversation_is_no_bomb():
    messages = [{"role": role, "content": "word " * 2000} for _ in range(100) for role in ("user", "assistant")]
    text = make(template=TEMPLATES["qwen"]).apply_chat_template(messages, tokenize=False)
    assert len(text) > 2_000_000


# Where the template is


def test_lookup_order():
    everywhere = files({"chat_template": "config"}, template="jinja", chat_template={"chat_template": "json"})
    for gone, expected in ((None, "jinja"), ("chat_template.jinja", "json"), ("chat_template.json", "config")):
        everywhere.pop(gone, None)
        assert Tokenizer.from_files(everywhere).apply_chat_template(USER, tokenize=False) == expected


def test_named_templates():
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = make({"chat_template": named})
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(USER, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(USER, tokenize=False, tools=TOOLS) == "tools"
    with pytest.raises(InstallError, match=r"none named 'default'"):
        make({"chat_template": named[1:]}).apply_chat_template(USER)


def test_without_a_template_chat_is_refused_and_completion_works():
    tokenizer = make()
    assert not tokenizer.has_chat_template
    assert tokenizer.chat_template is None
    with pytest.raises(OptionError, match="no chat template"):
        tokenizer.apply_chat_template(USER)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_a_broken_template_leaves_completion_alone():
    tokenizer = make(template="{% for %}")
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    with pytest.raises(InstallError, match=r"chat_template.jinja, line 1: not a valid chat template"):
        tokenizer.apply_chat_template(USER)


# BOS


@pytest.mark.parametrize(
    ("config", "adds_bos", "expected"),
    [
        ({"add_bos_token": True}, True, [BOS]),
        ({"add_bos_token": False}, False, []),
        ({}, True, [BOS]),
        ({}, False, []),
        ({"add_bos_token": True, "bos_token": None}, False, []),
    ],
)
def test_raw_prompts_get_bos_as_in_transformers(config, adds_bos, expected, tmp_path):
    made = files(config, adds_bos=adds_bos)
    tokenizer = Tokenizer.from_files(made)
    text = tokenizer.encode("hi", add_special_tokens=False)
    assert len(text) == 2
    assert tokenizer.encode("hi") == [*expected, *text]
    assert tokenizer.encode("hi") == theirs(tmp_path, made).encode("hi")
    assert tokenizer.encode("") == expected


@pytest.mark.parametrize(("says", "expected"), [(True, [BOS]), (False, [])])
def test_the_config_decides_about_bos_where_the_post_processor_disagrees(says, expected):
    tokenizer = make({"add_bos_token": says}, adds_bos=not says)
    assert tokenizer.encode("hi")[:-2] == expected


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize(("template", "writes_bos"), [(INST, True), (CHATML, False)])
def test_prompts_begin_with_exactly_one_bos(add_bos, template, writes_bos):
    tokenizer = make({"add_bos_token": add_bos}, template=template)
    text = tokenizer.apply_chat_template(USER, tokenize=False)
    for ids in (tokenizer.apply_chat_template(USER), tokenizer.encode(text)):
        assert ids.count(BOS) == int(add_bos or writes_bos)
        assert (ids[0] == BOS) == (add_bos or writes_bos)
    assert (
        tokenizer.encode(text, add_special_tokens=False)
        == (tokenizer.apply_chat_template(USER)[0 if writes_bos or not add_bos else 1 :])
    )


def test_an_eos_after_the_text_is_not_put_after_a_chat():
    tokenizer = make({"add_eos_token": True, "add_bos_token": True}, template=CHATML)
    assert tokenizer.encode("hi")[-1] == EOS
    assert EOS not in tokenizer.apply_chat_template(USER)


# Stop ids


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        ({}, {}, {EOS}),
        ({"eos_token": "<|end|>"}, {"config": {"eos_token_id": [3, 4]}}, {3, 4, END}),
        ({}, {"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [4, 5]}}, {EOS, 3, 4, 5}),
        ({}, {"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}, {EOS}),
        ({"eos_token": None}, {"config": {"text_config": {"eos_token_id": 4}}}, {4}),
        ({"eos_token": None}, {}, set()),
        ({"eos_token": {"content": "<|eot_id|>", "special": True}}, {}, {EOT}),
        ({"eos_token": "not a token"}, {"config": {"eos_token_id": 0}}, {0}),
        ({}, {"config": {"eos_token_id": [True, "x", -1, 3]}}, {EOS, 3}),
    ],
)
def test_stop_ids_are_the_union_of_all_sources(config, more, expected):
    assert make(config, **more).eos_token_ids == expected


def test_the_token_that_closes_a_turn_stops():
    assert make(template=CHATML).eos_token_ids == {EOS, IM_END}
    assert make(template=INST).eos_token_ids == {EOS}
    assert make({"chat_template": TEMPLATES["llama3"]}).eos_token_ids == {EOS, EOT}
    assert make(template="{{ '<|channel|>thought<|end|>' }}").eos_token_ids == {EOS}
    # A token of the vocabulary that is ordinary text closes nothing.
    plain = backend(special=SPECIAL[:2])
    made = Backend(models.BPE({**plain.get_vocab(), "<|im_end|>": plain.get_vocab_size()}, []))
    given = {"tokenizer.json": made.to_str().encode(), "chat_template.jinja": CHATML.encode()}
    assert Tokenizer.from_files(given).eos_token_ids == set()


def test_eos_token_id_is_the_tokenizers_own():
    assert make(config={"eos_token_id": [1, 3]}).eos_token_id == EOS
    assert make({"eos_token": None}, config={"eos_token_id": [4, 3]}).eos_token_id == 3
    assert make({"eos_token": None}).eos_token_id is None


# Text and ids


def test_text_comes_back():
    tokenizer = make()
    text = "Größe\t日本 😀\r\n <|im_end|> x"
    ids = tokenizer.encode(text)
    assert IM_END in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<|im_end|>", "")
    assert tokenizer.special_ids == set(range(len(SPECIAL)))
    assert tokenizer.vocab_size == len(tokenizer) == len(SPECIAL) + 256


def test_ids_of_a_padded_head_decode_to_nothing():
    tokenizer = make()
    assert tokenizer.id_to_token(100_000) is None
    assert tokenizer.decode([100_000, *tokenizer.encode("a"), 100_001]) == "a"


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(OptionError, match="surrogate"):
        make().encode("a\udc80b")
    with pytest.raises(OptionError, match="bytes, not a str"):
        make().encode(b"a")


def test_truncation_and_padding_of_a_training_script_are_ignored():
    made = backend()
    made.enable_truncation(4)
    made.enable_padding(length=16)
    tokenizer = Tokenizer.from_files({"tokenizer.json": made.to_str().encode()})
    assert len(tokenizer.encode("a" * 9)) == 9
    assert len(tokenizer.encode("a")) == 1


def test_tokens_that_only_the_config_declares(tmp_path):
    made = files()
    bare = backend(special=SPECIAL[:5])
    size = bare.get_vocab_size()
    made["tokenizer.json"] = bare.to_str().encode()
    declared = {
        str(size): {"content": "<|new|>", "special": True},
        str(size + 1): {"content": "<think>", "special": False},
        str(size + 9): {"content": "<|far|>", "special": True},
    }
    made["tokenizer_config.json"] = json.dumps({"added_tokens_decoder": declared, "eos_token": "<|new|>"}).encode()
    tokenizer = Tokenizer.from_files(made)
    assert tokenizer.encode("<|new|><think>") == [size, size + 1]
    assert size in tokenizer.special_ids
    assert size + 1 not in tokenizer.special_ids
    assert tokenizer.eos_token_ids == {size}
    # Its id would not be the declared one.
    assert tokenizer.token_to_id("<|far|>") is None


def test_a_named_token_of_the_vocabulary_is_kept_whole():
    plain = backend(special=[])
    vocab = {**plain.get_vocab(), "</s>": 256}
    made = Backend(models.BPE(vocab, []))
    made.pre_tokenizer = plain.pre_tokenizer
    given = {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": b'{"eos_token": "</s>"}'}
    tokenizer = Tokenizer.from_files(given)
    assert tokenizer.encode("a</s>")[-1] == 256
    assert tokenizer.special_ids == {256}


@pytest.mark.parametrize(
    "config",
    [
        {"extra_special_tokens": ["<a>"]},
        {"tokenizer_class": "TokenizersBackend"},
        {"added_tokens_decoder": 3},
        {"added_tokens_decoder": {"²": {"content": "<b>"}, "9" * 5000: {"content": "<c>"}}},
    ],
)
def test_other_spellings_of_the_config_load(config):
    assert make(config).encode("a")


def test_an_id_that_no_tokenizer_can_have_names_nothing():
    given = {**files(), "tokenizer_config.json": b"{}", "generation_config.json": b'{"bos_token_id": 4294967296}'}
    assert Tokenizer.from_files(given).bos_token is None


def test_text_that_the_tokenizer_fails_on_blames_its_file():
    made = Backend(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(InstallError, match=r"tokenizer\.json does not encode this text: .*UNK"):
        Tokenizer.from_files({"tokenizer.json": made.to_str().encode()}).encode("b")


def _without_special_tokens():
    """Loads, and panics when it is used."""
    document = json.loads(backend(adds_bos=True).to_str())
    document["post_processor"]["special_tokens"] = {}
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", _without_special_tokens()),
        ("tokenizer_config.json", b'{"bos_token": "\\ud800"}'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"{"),
        ("generation_config.json", b"3"),
        ("config.json", b"[" * 100_000),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.json", b"null"),
    ],
)
def test_damaged_files_are_named(name, data):
    made = files(template=None if name == "chat_template.json" else "x")
    with pytest.raises(InstallError, match=name):
        Tokenizer.from_files({**made, name: data})


def test_a_missing_tokenizer_is_named():
    with pytest.raises(InstallError, match=r"tokenizer.json is missing"):
        Tokenizer.from_files({})


def test_from_install_reads_side_files():
    class Install:
        made = files(template="x", generation_config={"eos_token_id": 3})

        def read_side_file(self, name, default):
            return self.made.get(name, default)

    tokenizer = Tokenizer.from_install(Install())
    assert tokenizer.has_chat_template
    assert tokenizer.eos_token_ids == {EOS, 3}


def test_mlx_lm_can_wrap_it():
    tokenizer_utils = pytest.importorskip("mlx_lm.tokenizer_utils")
    wrapped = tokenizer_utils.TokenizerWrapper(make(template=CHATML))
    assert wrapped.has_chat_template
    assert wrapped.apply_chat_template(USER, add_generation_prompt=True) == make(template=CHATML).apply_chat_template(
        USER
    )
    detokenizer = wrapped.detokenizer
    for id in wrapped.encode("hé 😀"):
        detokenizer.add_token(id)
    detokenizer.finalize()
    assert detokenizer.text == "hé 😀"


def test_templates_compile_errors_name_their_origin():
    with pytest.raises(InstallError, match="mine, line 2"):
        ChatTemplate("a\n{% if %}", "mine")
