"""What the registry holds for a family: the functions of its modules under the names of ``protocols.Family``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.protocols import ModelConfig


class NoGguf:
    """Stands for the module of a family whose GGUF files are not converted: they are known, so that they are refused
    with the reason."""

    def __init__(self, instead: str = "the published safetensors checkpoint"):
        """``instead`` is what to take, with what it is good for."""
        self._instead = instead

    def hf_config_from_gguf(self, metadata: Mapping[str, Any]) -> NoReturn:
        """Raises ConvertError."""
        raise ConvertError(
            f"GGUF: general.architecture is {metadata.get('general.architecture')!r}, whose GGUF files this version"
            f" does not convert. Take {self._instead}, or an MLX-quantized copy of it."
        )

    def gguf_name(self, name: str, config: ModelConfig) -> NoReturn:
        """Raises ConvertError."""
        raise ConvertError(f"GGUF: tensor {name!r} is of a family whose GGUF files this version does not convert.")

    def gguf_rows(self, checkpoint_name: str, config: ModelConfig) -> None:
        """No tensor of the family is stored in another order, because none is read."""


class DeclaredFamily:
    """See ``turbospark_mlx.protocols.Family``."""

    def __init__(
        self,
        name: str,
        config: ModuleType,
        weights: ModuleType,
        gguf: ModuleType | NoGguf,
        *,
        model_types: tuple[str, ...],
        manifest_families: tuple[str, ...],
        gguf_architectures: tuple[str, ...],
    ):
        """The family called ``name``, of which each module has the functions of ``protocols.Family`` that are its."""
        self.name = name
        self.model_types, self.manifest_families = model_types, manifest_families
        self.gguf_architectures = gguf_architectures
        self.config_from_hf, self.config_from_manifest = config.config_from_hf, config.config_from_manifest
        self.place, self.expected, self.experts = weights.place, weights.expected, weights.experts
        self.settle = getattr(weights, "settle", self._settled)
        self.table_facts = getattr(weights, "table_facts", self._no_table)
        self.hf_config_from_gguf, self.gguf_name = gguf.hf_config_from_gguf, gguf.gguf_name
        self.gguf_rows, self.converts_gguf = gguf.gguf_rows, not isinstance(gguf, NoGguf)
        self.unused = getattr(weights, "unused", self._all_used)

    @staticmethod
    def _settled(
        config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str], Any]
    ) -> ModelConfig:
        """For families whose configuration says everything."""
        return config

    @staticmethod
    def _no_table(config: ModelConfig) -> None:
        """For families whose models have no table."""
        return None

    @staticmethod
    def _all_used(config: ModelConfig) -> Mapping[str, str]:
        """For families whose logits depend on every tensor."""
        return {}
