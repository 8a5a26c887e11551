"""Every house rule finds the fault it is there for, and passes its opposite."""

import pytest

from tests.house import rules


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("depthfx/alloc/units.py", "from depthfx.lowering import ops"),
        ("depthfx/alloc/units.py", "def f():\n    import depthfx.runtime.engine"),
        ("depthfx/alloc/units.py", "from ..runtime import engine"),
        ("depthfx/errors.py", "from depthfx import api"),
        ("depthfx/lowering/ops.py", "from depthfx.passes.context import PassContext"),
        ("depthfx/passes/context.py", "if TYPE_CHECKING:\n    from depthfx.runtime.engine import Engine"),
        ("depthfx/runtime/engine.py", "import depthfx"),
        ("depthfx/runtime/engine.py", "from depthfx import compile"),
        ("depthfx/novel.py", "from depthfx import errors"),
        ("depthfx/passes/match.py", "import triton.language as tl"),
        ("depthfx/runtime/engine.py", "from transformers import AutoConfig"),
    ],
)
def test_layering_refuses(path, source):
    assert rules.check_layering(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("depthfx/runtime/engine.py", "from depthfx.alloc.manager import MemoryManager\nfrom depthfx.lowering import ops"),
        ("depthfx/runtime/engine.py", "from depthfx.errors import DepthfxError\nfrom . import scheduler"),
        ("depthfx/lowering/kernels/kv_append.py", "import triton"),
        ("depthfx/api.py", "from depthfx.passes import pipeline\nimport transformers"),
        ("depthfx/cli.py", "import depthfx"),
        ("depthfx/passes/match.py", "if TYPE_CHECKING:\n    from transformers import PreTrainedModel"),
    ],
)
def test_layering_allows(path, source):
    assert rules.check_layering(path, source) == []


def test_sizes():
    def function(lines, decorator=""):
        return f"{decorator}def f():\n" + "    x = 1\n" * lines

    assert rules.check_sizes("a.py", "x = 1\n" * 401) == ["1: 401 lines; at most 400"]
    assert rules.check_sizes("a.py", function(60)) == ["1: f has 61 lines; at most 60"]
    assert rules.check_sizes("a.py", function(59)) == []
    assert rules.check_sizes("a.py", function(80, "@triton.jit\n")) == []
    assert rules.check_sizes("a.py", function(120, "@triton.jit\n"))


def test_docstrings():
    long = '"""A."""\nclass C:\n    """C."""\n    def f(self):\n' + "        x = 1\n" * 4
    assert rules.check_docstrings("a.py", "x = 1") == ["1: the module has no docstring"]
    assert rules.check_docstrings("a.py", '"""A."""\ndef f():\n    return 1') == ["2: f has no docstring"]
    assert rules.check_docstrings("a.py", long) == ["4: f has no docstring"]
    assert rules.check_docstrings("a.py", '"""A."""\ndef _f():\n    return 1\ndef g():\n    """G."""\n') == []


@pytest.mark.parametrize("clause", ["except Exception:", "except:", "except BaseException as e:", "except (ValueError, Exception):"])
def test_excepts(clause):
    assert rules.check_excepts("a.py", f"try:\n    x\n{clause}\n    pass")
    assert rules.check_excepts("a.py", "try:\n    x\nexcept (ValueError, KeyError):\n    pass") == []
    assert rules.check_excepts("a.py", "try:\n    x\nexcept BaseException:\n    y()\n    raise") == []
    assert rules.check_excepts("a.py", "try:\n    x\nexcept Exception:\n    y()\n    raise")


@pytest.mark.parametrize("source", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"])
def test_environment(source):
    assert rules.check_environment("depthfx/api.py", source)
    assert rules.check_environment("depthfx/settings.py", source) == []


@pytest.mark.parametrize("line", ["x.to(device)", "x.to(self.device, non_blocking=True)", "x.cuda()", "x.pin_memory()"])
def test_uploads(line):
    assert rules.check_uploads("depthfx/runtime/runner.py", line)
    assert rules.check_uploads("depthfx/runtime/generation.py", line) == []
    assert rules.check_uploads("depthfx/runtime/runner.py", "x.to(torch.float32)") == []


def test_registers():
    kernel = "depthfx/lowering/kernels/kv_append.py"
    assert rules.check_registers(kernel, "def register_later():\n    register_kernel(1)")
    assert rules.check_registers(kernel, "seen = set()\nseen.add(1)")
    assert rules.check_registers(kernel, "SPEC = register_kernel(KernelSpec())") == []
    assert rules.check_registers(kernel, "FORMATS.add('plain16', Plain16())") == []
    assert rules.check_registers(kernel, "@register_format\nclass F:\n    pass") == []
    assert rules.check_registers("depthfx/lowering/kernels/_tiles.py", "x = 1") == []
    assert rules.check_registers(kernel, "x = 1", frozenset({"depthfx.lowering.kernels.kv_append"})) == []
    assert rules.check_registers(kernel, "x = 1", frozenset({"depthfx.lowering.kernels.rms_norm"}))


def test_asserts():
    assert rules.check_asserts("t.py", "def test_a():\n    print(1)") == ["1: test_a asserts nothing"]
    assert rules.check_asserts("t.py", "def helper():\n    assert 1") == ["1: the file holds no test"]
    assert rules.check_asserts("t.py", "def helper():\n    assert 1\ndef test_a():\n    helper()") == []
    assert rules.check_asserts("t.py", "def test_a():\n    with pytest.raises(ValueError):\n        f()") == []


@pytest.mark.parametrize("text", ["see /" + "opt/wheels", "cd '/" + "work/main'", "https://py" + "pi.org/simple", "/" + "root/.cache"])
def test_places(text):
    assert rules.check_places("a.md", text)
    assert rules.check_places("a.md", "/usr/share, work/main, and https://example.org") == []


def test_commands():
    known = ({"test"}, {"demo"})
    assert rules.unknown_commands("run `make tset` first", *known) == ["make tset"]
    assert rules.unknown_commands("```sh\npython -m depthfx dmeo\n```", *known) == ["python -m depthfx dmeo"]
    assert rules.unknown_commands("`make test`, `depthfx demo --x`, and make sense", *known) == []
