"""The `.gturbo` install format: reader, validator and writer."""

from turbospark_mlx.gturbo.experts_layout import ExpertLayer, ExpertsLayout, ExpertTensor
from turbospark_mlx.gturbo.formats import TensorSpec
from turbospark_mlx.gturbo.install import Install, Verification
from turbospark_mlx.gturbo.resident_index import TensorEntry
from turbospark_mlx.gturbo.writer import InstallWriter

__all__ = [
    "ExpertLayer",
    "ExpertTensor",
    "ExpertsLayout",
    "Install",
    "InstallWriter",
    "TensorEntry",
    "TensorSpec",
    "Verification",
]
