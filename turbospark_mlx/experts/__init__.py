"""Where the routed experts of a mixture live: in memory, in a few slots that are read from disk, or in mapped files.

``open_experts`` gives the factory that a model makes its layers' experts with (``protocols.ExpertFactory``).
"""

from turbospark_mlx.experts.counters import ExpertCounters
from turbospark_mlx.experts.on_device import Routed, SlotMaps
from turbospark_mlx.experts.resolve import Resolved, least_bytes
from turbospark_mlx.experts.store import ExpertStore, open_experts

__all__ = ["ExpertCounters", "ExpertStore", "Resolved", "Routed", "SlotMaps", "least_bytes", "open_experts"]
