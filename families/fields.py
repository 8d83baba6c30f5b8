"""Reading fields of a configuration that someone else wrote: every value is checked, every refusal names its field.

Knows nothing of any family, only what all configurations must fulfil.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark_mlx.errors import ConvertError, TurbosparkError, counted

LARGEST_SIZE = 2**31 - 1
"""MLX keeps array dimensions in 32 bits."""
MOST_LAYERS = 4096
"""Far above any model; a count in a file must not decide how long a loop runs."""

SMALLEST_NUMBER, LARGEST_NUMBER = 1e-18, 1e18
"""Beyond any model's, and near enough that squares and quotients of two of them stay within float32."""

_REQUIRED: Any = object()


def check_decided(tie_word_embeddings: bool | None) -> None:
    """Raise ConvertError for a configuration in which it is still open whether the head is the embedding."""
    if tie_word_embeddings is None:
        raise ConvertError("tie_word_embeddings is not decided: config.json is silent and the tensors were not seen.")


def arch_sizes(config: Any) -> dict[str, Any]:
    """What is under the same keys of a manifest's ``arch`` whatever the family, for grouped attention: layers of both
    kinds are alike, and a family puts over it what differs. Raises ConvertError as `check_decided` does."""
    check_decided(config.tie_word_embeddings)
    return {
        "hiddenSize": config.hidden_size,
        "numHeads": config.num_attention_heads,
        "numKVHeads": config.num_key_value_heads,
        "numFullKVHeads": config.num_key_value_heads,
        "headDim": config.head_dim,
        "fullHeadDim": config.head_dim,
        "vocabSize": config.vocab_size,
        "ropeTheta": config.rope_theta,
        "fullRopeTheta": config.rope_theta,
        "numLayers": config.num_hidden_layers,
        "tieWordEmbeddings": config.tie_word_embeddings,
        "trainedContext": config.max_position_embeddings,
    }


@dataclass(frozen=True)
class Fields:
    """The fields of one JSON object, read with checks.

    ``where`` is how messages call the object (``"config.json"``, ``"manifest.json: arch"``); ``error`` is the class
    that they raise. A field that is absent or null takes ``default``; without a default it is required.
    """

    values: Mapping[str, Any]
    where: str
    error: type[TurbosparkError]

    def refuse(self, key: str, why: str) -> TurbosparkError:
        """The error to raise about ``key``: it shows the value that was found, as far as anyone would read it."""
        return self.error(f"{self.where}: {key} is {self.values.get(key)!r:.200}; {why}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(f"{self.where}: {key} is missing. The model cannot be built without it.")
        return default

    def size(self, key: str, default: Any = _REQUIRED, *, least: int = 1, most: int = LARGEST_SIZE) -> Any:
        """A whole number between ``least`` and ``most``."""
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(key, f"expected a whole number from {least} to {most}.")
        return value

    def number(self, key: str, default: Any = _REQUIRED, *, above: float = 0.0) -> Any:
        """A number greater than ``above``, in size between ``SMALLEST_NUMBER`` and ``LARGEST_NUMBER``, or zero."""
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "expected a number.")
        # Compared before any conversion: a whole number of a file may exceed what a float holds. NaN fails as well.
        if not above < value <= LARGEST_NUMBER or 0 < abs(value) < SMALLEST_NUMBER:
            raise self.refuse(
                key,
                f"expected a number greater than {above:g}, from {SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g} in size.",
            )
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._get(key, default)
        if value is not default and not isinstance(value, bool):
            raise self.refuse(key, "expected true or false.")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._get(key, default)
        if value is not default and not isinstance(value, str):
            raise self.refuse(key, "expected a string.")
        return value

    def items(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._get(key, default)
        if value is default:
            return value
        if not isinstance(value, list | tuple):
            raise self.refuse(key, "expected a list.")
        return tuple(value)

    def object(self, key: str) -> Fields:
        """The fields of a nested object; of an empty one where ``key`` is absent or null."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.refuse(key, "expected an object.")
        return Fields(value, f"{self.where}: {key}", self.error)

    def decoder(self) -> Fields:
        """Those of a config.json that are about its decoder: ``text_config``, or these themselves where there is none.
        What is said in both must be the same."""
        if not self.has("text_config"):
            return self
        inner = self.object("text_config")
        for key in ("vocab_size", "tie_word_embeddings"):
            if self.has(key) and inner.has(key) and self.values[key] != inner.values[key]:
                raise self.refuse(key, f"but in text_config it is {inner.values[key]!r}.")
        return inner

    def known(self, understood: set[str]) -> None:
        """Refuse a field that is none of ``understood``, unless it is null."""
        for key in self.values:
            if key not in understood and self.has(key):
                raise self.refuse(key, "this version does not understand such a field here.")

    def exactly(self, known: set[str]) -> None:
        """Refuse an object whose fields are not just those of ``known``: one too many or one too few."""
        if unknown := sorted(self.values.keys() - known):
            raise self.error(
                f"{self.where}: unknown field {unknown[0]!r}."
                " A newer version may have written it; update turbospark-mlx."
            )
        if missing := sorted(known - self.values.keys()):
            raise self.error(f"{self.where}: {missing[0]} is missing.")

    def allow_only(self, key: str, harmless: tuple[Any, ...], why: str) -> None:
        """Refuse ``key`` unless it is absent, null, or one of the values that leave the model as it is."""
        value = self.values.get(key)
        if value is not None and not any(
            value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless
        ):
            raise self.refuse(key, why)


def check_layer_kinds(fields: Fields, config: Any) -> None:
    """Refuse a configuration that does not say of what kind each layer is."""
    kinds, layers = len(config.layer_types), config.num_hidden_layers
    if kinds != layers:
        raise fields.error(f"{fields.where}: {counted(kinds, 'layer kind')} for {counted(layers, 'layer')}.")


def check_head_groups(fields: Fields, heads: int, kv_heads: int) -> None:
    """Refuse query heads that cannot share the key/value heads evenly."""
    if heads % kv_heads:
        raise fields.error(f"{fields.where}: {heads} attention heads cannot share {kv_heads} key/value heads evenly.")


def check_layers(fields: Fields, config: Any) -> None:
    """Refuse a configuration whose layers and kinds of layers, or heads, do not fit each other."""
    check_layer_kinds(fields, config)
    check_head_groups(fields, config.num_attention_heads, config.num_key_value_heads)
