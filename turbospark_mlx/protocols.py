"""The contracts between the parts of the package. Imports nothing of ours.

``gturbo`` knows bytes and JSON, ``convert`` knows checkpoint formats, ``families`` know models. They meet here: a
family describes its configuration and where each checkpoint tensor goes, in terms that neither of the others owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

Role = Literal["embedding", "attention", "router", "shared_expert", "routed_expert", "head", "vector"]
"""What a tensor is for. ``shared_expert`` includes the feed-forward matrices of dense layers, as in the manifest's
``quant`` block; ``vector`` is everything that is never quantized (norms, biases, scalars)."""


@dataclass(frozen=True)
class AffineFormat:
    """How one matrix is packed: ``w = scale * q + bias`` over groups of ``group_size`` input columns.

    ``companion_dtype`` is the dtype of scales and biases: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    """

    bits: int
    group_size: int
    companion_dtype: str


@dataclass(frozen=True)
class Mxfp4Format:
    """A matrix in MXFP4 (OCP Microscaling Formats, version 1.0): blocks of 32 input columns, each with an exponent.

    ``w = FP4[code] * 2 ** (exponent - 127)``, where FP4 is 0, 0.5, 1, 1.5, 2, 3, 4, 6 and, with bit 3 set, their
    negatives. Element 2 j of a row is the low half of its byte j. An exponent of 255 is not a number.
    """

    bits: ClassVar[int] = 4
    group_size: ClassVar[int] = 32


PackedFormat = AffineFormat | Mxfp4Format


@dataclass(frozen=True)
class RoutedPart:
    """What of a layer's routed experts one checkpoint tensor holds.

    ``position`` counts the layers that have any. ``tensors`` are those of ``ExpertSpec.tensors`` that lie in it, one
    after the other along the rows, in equal shares: ``("gate",)``, or ``("gate", "up")`` where a checkpoint joins them.
    ``expert`` is the one that it belongs to, or None where it holds all of them along its first axis. ``interleaved``
    tensors take turns a row instead. ``transposed`` ones are ``[columns, rows]``.
    """

    position: int
    tensors: tuple[str, ...]
    expert: int | None = None
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class TablePart:
    """What one checkpoint tensor holds of a table that stays on disk: the rows of part ``number`` of ``parts``, all of
    which have as many."""

    number: int
    parts: int


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor goes in an install.

    ``name`` is the install's tensor name and ends in ``.weight`` for matrices. ``checkpoint_name`` is the name that
    the module's parameter carries, which is the published checkpoint's. Tensors of routed experts, and only they, have
    ``routed``: their bytes go to the layer's expert file, and ``name`` is what messages call them. A ``table`` is a
    matrix of which a token needs a few rows, whose bytes go to the install's table; an install has at most one.
    """

    name: str
    role: Role
    checkpoint_name: str
    routed: RoutedPart | None = None
    table: TablePart | None = None


@dataclass(frozen=True)
class Dropped:
    """A checkpoint tensor that is left out of an install on purpose, with the reason that is reported."""

    reason: str


class ModelConfig(Protocol):
    """A family's frozen dataclass. Built from a config.json or from a manifest; both give equal objects."""

    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool | None
    """None where config.json is silent: then the tensors decide. Whoever sees them replaces it with
    ``dataclasses.replace``; ``to_manifest`` and ``Family.expected`` refuse None."""

    def kv_bytes(self, context: int, itemsize: int) -> int:
        """Bytes that the caches of one sequence of ``context`` tokens take, with elements of ``itemsize`` bytes."""
        ...

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``(arch, extension)``: the manifest's ``arch`` object, complete, and what ``arch`` cannot say."""
        ...

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines assume for each key of the extension, so that the writer can tell whether an
        install needs the flag that makes them refuse it."""
        ...


class Family(Protocol):
    """What the registry holds for each family package, as its module-level ``FAMILY``."""

    name: str
    model_types: tuple[str, ...]
    """``model_type`` spellings of config.json that this family runs."""
    manifest_families: tuple[str, ...]
    """``arch.family`` spellings of manifests that this family runs."""
    gguf_architectures: tuple[str, ...]
    """``general.architecture`` spellings of GGUF files of this family."""
    converts_gguf: bool
    """Whether those files are converted; otherwise ``hf_config_from_gguf`` refuses each with the reason."""

    def config_from_hf(self, config: Mapping[str, Any]) -> ModelConfig:
        """Parse config.json, in the published and in the transformers 5 spelling. Raises ConvertError on every field
        that changes the model and is not understood."""
        ...

    def config_from_manifest(self, arch: Mapping[str, Any], extension: Mapping[str, Any]) -> ModelConfig:
        """Parse a manifest. ``extension`` is empty for installs of the elder engines. Raises InstallError."""
        ...

    def hf_config_from_gguf(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json dictionary with the same meaning as GGUF metadata. Raises ConvertError."""
        ...

    def settle(
        self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str], Any]
    ) -> ModelConfig:
        """The configuration with what config.json leaves to a checkpoint's tensors: to their ``shapes``, by name, and
        to what ``values(name)`` reads of one that is small, a numpy array of float32, or of int64 where it is whole
        numbers."""
        ...

    def place(self, checkpoint_name: str, config: ModelConfig) -> Placement | Dropped:
        """Where a checkpoint tensor goes. ``checkpoint_name`` is in the published or the mlx spelling, without the
        ``.scales`` / ``.biases`` companions. Idempotent: an install name maps to itself. A head beside a tied
        embedding is ``Dropped``; whether it is the embedding's copy is for the caller to check. Raises ConvertError
        for a name that the family does not know."""
        ...

    def expected(self, config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
        """Install name -> logical shape of every tensor that the model needs. Of routed experts that is one stack a
        matrix, ``[experts, rows, columns]``, as the module has it."""
        ...

    def experts(self, config: ModelConfig) -> Mapping[str, ExpertSpec]:
        """Parameter path -> the routed experts there, one a layer that has any, by position. Empty for dense models.
        ``families.routed`` names the parameters below a path."""
        ...

    def table_facts(self, config: ModelConfig) -> Mapping[str, Any] | None:
        """What the header of an install's table says of the model (``gturbo.row_table.FACTS``); None for models
        without one."""
        ...

    def unused(self, config: ModelConfig) -> Mapping[str, str]:
        """Install name -> reason: tensors of ``expected`` that no logit depends on."""
        ...

    def gguf_name(self, name: str, config: ModelConfig) -> str | Dropped:
        """The checkpoint name of a GGUF tensor name. Raises ConvertError for a name that the family does not know."""
        ...

    def gguf_rows(self, checkpoint_name: str, config: ModelConfig) -> Sequence[int] | None:
        """For a GGUF tensor whose rows are stored in another order: the GGUF row of each installed row."""
        ...


@runtime_checkable
class LayerCache(Protocol):
    """The state of one layer. mlx-lm's tools use the first group of names, ours use the second as well."""

    offset: int
    state: Any

    @property
    def nbytes(self) -> int: ...
    def is_trimmable(self) -> bool: ...
    def trim(self, n: int) -> int: ...

    @property
    def arrays(self) -> list[Any]:
        """What must be evaluated for this state to be complete; kernels may write into it later."""
        ...

    def places(self, length: int) -> bool:
        """Whether kernels may write ``length`` more tokens into this state themselves, which then has ``place`` and
        ``written`` too (see ``cache.LinearKV``, ``cache.RecurrentState``). A state that never allows it keeps steps
        from being recorded."""
        ...

    def reusable(self, prefix_len: int) -> int:
        """The longest prefix, at most ``prefix_len``, that this state can go back to by itself."""
        ...

    def mark(self) -> Any:
        """A point to come back to. Cheap: holds references, and copies only what a kernel will write over."""
        ...

    def rollback(self, mark: Any) -> None:
        """Go back to ``mark``: the state equals never having gone on. Raises ContextError for a mark that is no
        longer part of this state's history."""
        ...


Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""How an expert joins its gate ``g`` and up ``u`` before ``down``: ``silu(g) * u``; ``gelu(g) * u`` with the tanh
approximation; or gpt-oss's ``g * sigmoid(alpha * g) * (u + 1)``, with ``g`` cut above ``limit`` and ``u`` on both
sides."""


@dataclass(frozen=True)
class ExpertSpec:
    """The routed experts of one layer, as the model's configuration describes them.

    Each expert is ``down(activation(gate(x), up(x)))`` over ``hidden`` inputs; ``biases`` says whether its three
    matrices have additive ones, added before the activation. How they are stored is the install's to say.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    """``alpha`` and ``limit`` belong to ``clamped_swiglu``."""
    biases: bool = False

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> logical shape of the tensors of one expert, in the order in which its blob holds them."""
        found: dict[str, tuple[int, ...]] = {}
        for name, rows, columns in (
            ("gate", self.intermediate, self.hidden),
            ("up", self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
        ):
            found[name] = (rows, columns)
            if self.biases:
                found[f"{name}_bias"] = (rows,)
        return found


class Experts(Protocol):
    """The routed experts of one layer. The layer that asks never knows where they live.

    Between ``begin`` and ``finish`` the layer builds everything that does not need their answer, so that it runs while
    experts are read. Each ``begin`` is finished before the next one of the same layer.
    """

    def begin(self, indices: Any) -> Any:
        """Start on the experts that the router chose: ``indices [rows, top_k]``, integer, best first, distinct within
        a row. Returns what ``finish`` takes."""
        ...

    def finish(
        self, pending: Any, x: Any, weights: Any, *, meanwhile: tuple[Any, ...] = (), residual: Any = None
    ) -> Any:
        """``sum_k weights[:, k] * expert[indices[:, k]](x)``, added in the router's order: ``x [rows, hidden]``,
        ``weights [rows, top_k]`` float32 -> ``[rows, hidden]`` in the dtype of ``x``. ``meanwhile`` are arrays that the
        layer built since ``begin``: they are set going before anything is waited for. ``residual``, like ``x``, is
        added to the sum."""
        ...


class RowTable(Protocol):
    """A matrix that is too large for memory, of which rows are read as they are needed."""

    shape: tuple[int, int]

    def rows(self, ids: Any) -> Any:
        """Rows ``ids``, a numpy array of whole numbers, as float32 ``[*ids.shape, columns]``, also numpy's. Raises
        IndexError, before anything is read, for an id that is none of the table's."""
        ...


ExpertFactory = Callable[[int, ExpertSpec], Experts]
"""``experts(position, spec)``: what a model is given to make each layer's experts; ``position`` counts the layers that
have any. Whoever opens an install chooses where they live."""
