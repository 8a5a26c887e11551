"""Entry of a worker process: compile the kernel variants that arrive as JSON lines, answer each with ``done``.

An error ends the process with its traceback on stderr; the parent then lists the kernel and compiles it itself. The end of
the input, also by the parent's death, ends the process.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Serve variants from stdin; what libraries print goes to stderr."""
    context = json.loads(sys.argv[1])
    sys.path[:] = context["path"]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import triton

    triton.knobs.cache.dir = context["cache"]
    from triton.backends.nvidia.driver import CudaLauncher

    from depthfx.lowering import ops  # noqa: F401 - imports all kernels while the parent is still busy elsewhere
    from depthfx.lowering.precompile import Variant

    for line in sys.stdin:
        request = json.loads(line)
        launcher = request.pop("launcher")
        variant = Variant(**{**request, "target": tuple(request["target"])})
        source, options, target = variant.source()
        kernel = triton.compile(source, target=target, options=options)
        if launcher:
            CudaLauncher(kernel.src, kernel.metadata)  # compiles the C code that launches it, also into the cache
        answers.write("done\n")
        answers.flush()


if __name__ == "__main__":
    main()
