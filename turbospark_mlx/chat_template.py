"""Renders the jinja chat template that comes with a model.

A template is foreign code: it runs in jinja's immutable sandbox, sees plain data only, and works on a budget of
characters and seconds, because the sandbox alone lets a short template fill the memory or never end.
The environment is the one that chat templates are written for: ``trim_blocks``, ``lstrip_blocks``, loop controls,
``raise_exception``, ``strftime_now``, a ``tojson`` that escapes nothing, and the ``generation`` tag.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from turbospark_mlx.errors import InstallError, OptionError

MAX_CHARACTERS = 1 << 26
"""How many characters one rendering may produce in all its intermediate values together."""
MAX_SECONDS = 30.0
"""How long one rendering may take."""
MAX_WIDTH = 10_000
"""The widest padding, indent or batch that a template may ask for."""

_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*\{")
_CONTINUE_MARK = "\ue000continue\ue000 "
_REFUSED_METHODS = frozenset({"translate", "expandtabs", "format_map"})
_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})
_WIDTH_FILTERS = frozenset({"center", "indent", "tojson", "batch", "slice", "wordwrap"})
# fmt: off
_COLLECTION_FILTERS = frozenset({
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
    "rejectattr", "reverse", "select", "selectattr", "slice",
})
_COMPARING_TESTS = frozenset({
    "eq", "equalto", "==", "ne", "!=", "gt", "greaterthan", ">", "ge", ">=", "lt", "lessthan", "<", "le", "<=", "in",
})
# fmt: on


class _Budget:
    def __init__(self) -> None:
        self.characters = MAX_CHARACTERS
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise jinja2.TemplateRuntimeError(f"the template makes more than {MAX_CHARACTERS:,} characters of text")
        if time.monotonic() > self.deadline:
            raise jinja2.TemplateRuntimeError(f"the template takes more than {MAX_SECONDS:g} seconds")


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


def _spend(characters: int) -> None:
    # Constants are folded while a template is compiled, before there is a rendering to pay for them.
    budget = _budget.get(None) or _Budget()
    budget.spend(characters)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 1


def _text_size(value: Any) -> int:
    """About how many characters ``str(value)`` has. Lists that hold one list many times are counted, not walked."""
    sizes: dict[int, int] = {}

    def measure(item: Any) -> int:
        if isinstance(item, str):
            return len(item)
        if not isinstance(item, list | tuple | dict):
            return 8
        if id(item) not in sizes:
            parts = [*item.keys(), *item.values()] if isinstance(item, dict) else item
            sizes[id(item)] = 2 + sum(measure(part) + 2 for part in parts)
        return sizes[id(item)]

    return measure(value)


def _printable(value: Any) -> Any:
    """Pay for turning a value into text; strings are paid for where they are joined."""
    if isinstance(value, list | tuple | dict):
        _spend(_text_size(value))
    return value


def _metered(iterable: Iterable[Any]) -> Iterable[Any]:
    for item in iterable:
        _spend(1)
        yield item


def _concat(parts: Iterable[Any]) -> str:
    kept = []
    for part in parts:
        text = str(_printable(part))
        _spend(len(text))
        kept.append(text)
    return "".join(kept)


def _refuse_wide(what: str, arguments: Iterable[Any]) -> None:
    for argument in arguments:
        width = argument if isinstance(argument, int) else _size(argument)
        if width > MAX_WIDTH:
            raise jinja2.TemplateRuntimeError(f"{what} asks for a width of {width:,}; the limit is {MAX_WIDTH:,}")


def _charge_expansion(name: str, subject: Any, arguments: Sequence[Any]) -> None:
    """Pay in advance for what can multiply its input."""
    if name == "replace" and len(arguments) >= 2:
        _spend(str(subject).count(str(arguments[0])) * len(str(arguments[1])))
    elif name == "join" and arguments:
        separator, items = (subject, arguments[0]) if isinstance(subject, str) else (arguments[0], subject)
        _spend(len(str(separator)) * _size(items))


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja marks filters that take the context or environment as their first argument with this attribute.
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    def guarded(*args: Any, **kwargs: Any) -> Any:
        subject, arguments = args[leading] if len(args) > leading else None, args[leading + 1 :]
        if name in _WIDTH_FILTERS:
            _refuse_wide(f"the filter {name!r}", (*arguments, *kwargs.values()))
        if name not in _COLLECTION_FILTERS:
            _spend(_text_size((subject, *arguments)))
        if name == "format" and _WIDE_FORMAT.search(str(subject)):
            raise jinja2.TemplateRuntimeError("the filter 'format' asks for a width that is not a small constant")
        _charge_expansion(name, subject, arguments)
        result = function(*args, **kwargs)
        _spend(_size(result))
        return result

    if leading:
        guarded.jinja_pass_arg = function.jinja_pass_arg
    return guarded


def _paid_test(function: Callable[..., Any]) -> Callable[..., Any]:
    def paid(*args: Any) -> Any:
        return function(*map(_printable, args))

    return paid


class _Namespace(Namespace):
    """A namespace may hold itself, or one other many times, so its text does not spell out what it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; when rendering it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Any) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Metering(NodeTransformer):
    """Routes loops, ``~``, comparisons and list displays through filters that pay for them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._through("_metered", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return self._through("_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        # Lists that hold one list many times are small in memory and endless to compare.
        self.generic_visit(node)
        for side in (node, *node.ops):
            side.expr = self._through("_printable", side.expr)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Filter:
        self.generic_visit(node)
        return self._through("_printable", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return self._through("_printable", node) if node.ctx == "load" else node

    def _through(self, name: str, node: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_concat)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _REFUSED_METHODS)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _spend(len(sequence) * max(count, 0))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            # Python's integers grow without bound; a template's have no reason to.
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > 4096:
                raise jinja2.TemplateRuntimeError(f"the result of {operator!r} is too large")
        if operator == "%" and isinstance(left, str):
            if _WIDE_FORMAT.search(left):
                raise jinja2.TemplateRuntimeError("'%' asks for a width that is not a small constant")
            _spend(_text_size(right))
        if operator == "+":
            _spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if _WIDE_FORMAT.search(value.__self__):
            raise jinja2.TemplateRuntimeError("'format' asks for a width that is not a small constant")

        def format_paid(*args: Any, **kwargs: Any) -> str:
            _spend(_text_size((*args, *kwargs.values())))
            return wrapped(*args, **kwargs)

        return format_paid

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        name, subject = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if isinstance(subject, str):
            if name in _WIDTH_METHODS:
                _refuse_wide(f"the method {name!r}", args)
            _charge_expansion(name, subject, args)
            _spend(_text_size(args))
        _spend(1)
        result = super().call(context, function, *args, **kwargs)
        _spend(_size(result))
        return result


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    for name, function in environment.filters.items():
        environment.filters[name] = _guarded_filter(name, function)
    for name in _COMPARING_TESTS:
        environment.tests[name] = _paid_test(environment.tests[name])
    environment.filters["_metered"] = _metered
    environment.filters["_concat"] = _concat
    environment.filters["_printable"] = _printable
    # lipsum makes text by the megabyte; the dict type carries more than a constructor.
    del environment.globals["lipsum"]
    environment.globals["dict"] = lambda *args, **kwargs: _printable(dict(*args, **kwargs))
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _plain(value: Any, what: str) -> Any:
    """A copy of ``value`` made of dict, list, str, int, float, bool and None only.

    Objects carry methods that no sandbox knows, so anything else is refused. Raises OptionError naming ``what``.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, what): _plain(item, what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, what) for item in value]
    raise OptionError(
        f"{what} holds a {type(value).__name__}; chat templates take text, numbers, true, false, none, lists and "
        "dictionaries. Convert it first."
    )


class ChatTemplate:
    """One compiled chat template.

    ``source`` is the jinja text, ``origin`` the file it came from, for messages. Raises InstallError when the text is
    not a template.
    """

    def __init__(self, source: str, origin: str = "chat template") -> None:
        self.source = source
        self.origin = origin
        environment = _environment()
        try:
            tree = _Metering().visit(environment.parse(source))
            tree.set_environment(environment)
            code = environment.compile(tree, origin)
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except Exception as error:
            line = getattr(error, "lineno", None)
            where = origin if line is None else f"{origin}, line {line}"
            raise InstallError(
                f"{where}: not a valid chat template: {error or type(error).__name__}. Fetch the model again."
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False, **variables: Any
    ) -> str:
        """The text of a conversation.

        ``messages`` are dictionaries with at least ``role`` and, usually, ``content``; keys whose value is None count
        as absent. ``variables`` are what else the template may ask for. With ``continue_final_message`` the text ends
        where the last message's content ends. Raises OptionError, with the template's own message when the template
        refuses the conversation or fails on it.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise OptionError(
                f"messages is a {type(messages).__name__}; a chat is a list of dictionaries such as "
                '{"role": "user", "content": "Hello"}.'
            )
        chat = []
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise OptionError(
                    f"messages[{index}] is a {type(message).__name__}; each message is a dictionary with a role and "
                    "a content."
                )
            values = _plain(message, f"messages[{index}]")
            chat.append({key: value for key, value in values.items() if value is not None})
        if continue_final_message:
            if not chat or not isinstance(chat[-1].get("content"), str):
                raise OptionError("continue_final_message needs a last message whose content is text.")
            chat[-1]["content"] += _CONTINUE_MARK
        text = self._run(chat, {name: _plain(value, name) for name, value in variables.items()})
        if not continue_final_message:
            return text
        kept, mark, rest = text.rpartition(_CONTINUE_MARK.rstrip())
        if not mark:
            raise OptionError(f"The chat template ({self.origin}) leaves out the last message, so it cannot go on.")
        # The mark ends in a space: where that is gone, the template trims, and would have trimmed the content too.
        return kept if rest.startswith(" ") else kept.rstrip()

    def _run(self, chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        token = _budget.set(_Budget())
        try:
            return self._template.render(variables, messages=chat)
        except Exception as error:
            # Whatever goes wrong in there is the template's doing: it is the only code that runs.
            reason = str(error) or type(error).__name__
            raise OptionError(
                f"The chat template ({self.origin}) does not accept this conversation: {reason}"
            ) from error
        finally:
            _budget.reset(token)
