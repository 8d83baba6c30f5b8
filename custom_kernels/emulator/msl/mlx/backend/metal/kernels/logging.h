// Stands in for MLX's logging, which kernels of other projects cannot use.
#pragma once
